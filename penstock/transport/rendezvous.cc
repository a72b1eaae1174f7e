#include "penstock/transport/rendezvous.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <string_view>
#include <system_error>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStoreBackend.hpp>
#include <utility>

#include "penstock/tensor/reason.h"
#include "penstock/transport/child_sockets.h"
#include "penstock/transport/processes.h"
#include "penstock/transport/sockets.h"

namespace penstock {
namespace {

constexpr const char* kHint =
    "\n  Hint: whatever starts the ranks, such as torchrun, sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.";

// What whoever starts the ranks calls things, the likeliest first.
struct Launcher {
  const char* rank;
  const char* ranks;
  const char* local_rank;
  const char* local_ranks;
};
constexpr std::array kLaunchers{
    Launcher{"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    // srun sets the second; a batch script that starts one process has only the first.
    Launcher{"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"},
    Launcher{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
             "OMPI_COMM_WORLD_LOCAL_SIZE"},
    Launcher{"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"}};

// The first of "node[03-05,07],other": node03.
std::string first_node(const std::string& list) {
  const std::size_t bracket = list.find('[');
  if (bracket == std::string::npos || list.find(',') < bracket) return list.substr(0, list.find(','));
  const std::size_t end = list.find_first_of("-,]", bracket);
  return list.substr(0, bracket) + list.substr(bracket + 1, end == std::string::npos ? end : end - bracket - 1);
}

class Reader {
 public:
  explicit Reader(const Variables& variables) : variables_(variables) {}

  // Empty when it is not set.
  std::string text(const char* name) const {
    const char* value = variables_ ? variables_(name) : std::getenv(name);
    return value == nullptr ? "" : value;
  }

  const Launcher& launcher() const {
    for (const Launcher& one : kLaunchers) {
      if (!text(one.ranks).empty() && !text(one.rank).empty()) return one;
    }
    return kLaunchers.front();
  }

  JobToken token() const {
    std::string secret = text("PENSTOCK_JOB_TOKEN");
    if (secret.empty()) secret = text("TORCHELASTIC_RUN_ID");
    // The steps of a Slurm job may be ranks of one run, with RANK and WORLD_SIZE of their own.
    if (secret.empty() && std::string_view(launcher().rank) == "SLURM_PROCID") {
      secret = text("SLURM_JOB_ID") + "." + text("SLURM_STEP_ID");
    }
    return JobToken(std::move(secret));
  }

  // One that the jobs of a machine are not likely to have in common; 0 outside of Slurm.
  int port_of_job() const {
    constexpr int kFirst = 20000;
    constexpr int kCount = 10000;
    const int job =
        text("SLURM_STEP_NUM_TASKS").empty() ? -1 : number("SLURM_JOB_ID", 0, std::numeric_limits<int>::max(), -1);
    return job < 0 ? 0 : kFirst + job % kCount;
  }

  int required(const char* name, int low, int high) const {
    if (text(name).empty()) throw RendezvousError(std::string(name) + " is not set." + kHint);
    return number(name, low, high, low);
  }

  int number(const char* name, int low, int high, int otherwise) const {
    const std::string value = text(name);
    if (value.empty()) return otherwise;
    int result = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), result);
    if (error == std::errc() && end == value.data() + value.size() && result >= low && result <= high) return result;
    const bool open = high == std::numeric_limits<int>::max();
    throw RendezvousError(
        std::string(name) + " is '" + value + "', expected a number " +
        (open ? "of at least " + std::to_string(low) : "from " + std::to_string(low) + " to " + std::to_string(high)) +
        ".");
  }

 private:
  const Variables& variables_;
};

bool is_loopback(const std::string& address) {
  return address == "localhost" || address == "::1" || address.starts_with("127.");
}

std::string place_of(const RankEnvironment& environment) {
  return environment.master_address + ":" + std::to_string(environment.master_port);
}

// torchrun's agent has the store, or rank 0 does.
bool serves(const RankEnvironment& environment) {
  return environment.rank == 0 && !environment.agent_serves;
}

// For a message: what is no printable character of ASCII is a dot.
std::string printable_bytes(std::string bytes) {
  std::ranges::replace_if(bytes, [](char c) { return c < ' ' || c > '~'; }, '.');
  return bytes;
}

Descriptor listening_socket(const RankEnvironment& environment) {
  if (environment.listening_fd >= 0) {
    int listens = 0;
    socklen_t size = sizeof listens;
    if (::getsockopt(environment.listening_fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0 || listens == 0) {
      throw RendezvousError("PENSTOCK_LISTENING_FD is '" + std::to_string(environment.listening_fd) +
                            "', expected a socket that listens.");
    }
    return Descriptor(environment.listening_fd);
  }
  try {
    return listen_on(environment.master_address, environment.master_port);
  } catch (const std::runtime_error& error) {
    throw RendezvousError("rank 0 cannot listen on MASTER_ADDR:MASTER_PORT, which is " + place_of(environment) + ": " +
                          error.what() +
                          ".\n  Hint: the address should be one of rank 0's machine, and the port free.");
  }
}

// Asks the store for a sign of life, in the few bytes that c10d's client sends first.
std::string ping_of_store(std::uint32_t nonce) {
  std::string bytes;
  const auto add = [&bytes](const auto& value) {
    bytes.append(reinterpret_cast<const char*>(&value), sizeof value);  // NOLINT(*-reinterpret-cast)
  };
  add(c10d::detail::QueryType::VALIDATE);
  add(c10d::detail::validationMagicNumber);
  add(c10d::detail::QueryType::PING);
  add(nonce);
  return bytes;
}

// Blocks until the store at the master's address answers. c10d's own client would wait without a deadline for an answer
// of something that listens there and says nothing.
void require_store(const RankEnvironment& environment, std::chrono::milliseconds timeout,
                   const WaitingFunction& on_waiting) {
  const std::string self = "rank " + std::to_string(environment.rank);
  const std::string where = "MASTER_ADDR:MASTER_PORT, which is " + place_of(environment);
  constexpr std::uint32_t kNonce = 0x70656e73;
  const std::string expected(reinterpret_cast<const char*>(&kNonce), sizeof kNonce);  // NOLINT(*-reinterpret-cast)
  WaitingLines lines(on_waiting, timeout);
  const Answer answer =
      ask(environment.master_address, environment.master_port, ping_of_store(kNonce), expected.size(),
          deadline_after(timeout), [&](const std::string& why) {
            lines.waiting([&] { return self + " waits for rank 0 at " + place_of(environment) + ": " + why; });
          });
  if (answer.bytes == expected) return;
  constexpr const char* kOtherProgram =
      ".\n  Hint: the port belongs to another program; choose a free one as MASTER_PORT for all ranks.";
  if (!answer.bytes.empty()) {
    throw RendezvousError(self + " found no store at " + where + ": what listens there answered '" +
                          printable_bytes(answer.bytes) + "' to a ping" + kOtherProgram);
  }
  if (answer.connected) {
    throw RendezvousError(self + " found no store at " + where +
                          ": what listens there has not answered a ping within " + seconds_text(timeout) + " (" +
                          answer.why +
                          ").\n  Hint: see whether rank 0 has started; if it has, the port belongs to another program, "
                          "and all ranks need a free one as MASTER_PORT.");
  }
  throw RendezvousError(self + " cannot reach " + where + ", within " + seconds_text(timeout) + ": " + answer.why +
                        ".\n  Hint: rank 0 has to be running there, on an address that the other ranks can reach.");
}

c10::intrusive_ptr<c10d::Store> make_store(const RankEnvironment& environment, std::chrono::milliseconds timeout,
                                           const WaitingFunction& on_waiting) {
  const Deadline deadline = deadline_after(timeout);
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(environment.master_port);
  options.isServer = serves(environment);
  options.waitWorkers = false;
  // The store has a thread that watches some, and one for the connection of each rank.
  constexpr int kOfStore = 16;
  try {
    require_descriptors(kOfStore + (options.isServer ? environment.ranks : 0));
  } catch (const std::runtime_error& error) {
    throw RendezvousError("rank " + std::to_string(environment.rank) + ": " + error.what());
  }
  const NewSockets sockets;
  Descriptor socket;
  if (options.isServer) {
    socket = listening_socket(environment);
    close_in_children(socket.number());
    options.masterListenFd = socket.number();
  } else {
    require_store(environment, timeout, on_waiting);
  }
  options.timeout =
      std::max(std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()), std::chrono::milliseconds(1000));
  try {
    auto store = c10::make_intrusive<c10d::TCPStore>(environment.master_address, options);
    // The store's from here on.
    socket.release();
    sockets.close_in_children();
    return store;
  } catch (const std::system_error& error) {
    // The store's own thread cannot be started.
    throw RendezvousError("rank " + std::to_string(environment.rank) + " cannot start the store: " +
                          error.code().message() + ".\n  Hint: `ulimit -u N` allows more threads and processes.");
  } catch (const std::exception& error) {
    const std::string what = reason_of(error);
    throw RendezvousError("rank " + std::to_string(environment.rank) + " found no store at " + place_of(environment) +
                          ": " + what.substr(0, what.find('\n')));
  }
}

}  // namespace

RankEnvironment read_environment(const Variables& variables) {
  const Reader reader(variables);
  constexpr int kMost = std::numeric_limits<int>::max();
  RankEnvironment environment;
  const Launcher& launcher = reader.launcher();
  environment.ranks = reader.required(launcher.ranks, 1, kMost);
  environment.rank = reader.required(launcher.rank, 0, environment.ranks - 1);
  environment.local_rank = reader.number(launcher.local_rank, 0, environment.ranks - 1, environment.rank);
  environment.master_port = reader.number("MASTER_PORT", 1, 65535, reader.port_of_job());
  if (environment.master_port == 0) reader.required("MASTER_PORT", 1, 65535);
  // srun's, with several nodes, is no number: "4(x2)".
  const bool are_local = reader.text(launcher.local_ranks).find_first_of("(,") == std::string::npos &&
                         reader.number(launcher.local_ranks, 1, environment.ranks, 0) == environment.ranks;
  std::string address = reader.text("MASTER_ADDR");
  if (address.empty() && !are_local) address = first_node(reader.text("SLURM_STEP_NODELIST"));
  environment.master_address = address.empty() ? kLoopback : address;
  environment.one_machine = are_local || is_loopback(environment.master_address);
  environment.agent_serves = reader.text("TORCHELASTIC_USE_AGENT_STORE") == "True";
  environment.attempt = reader.number("TORCHELASTIC_RESTART_COUNT", 0, kMost, 0);
  if (environment.rank == 0) environment.listening_fd = reader.number("PENSTOCK_LISTENING_FD", 0, kMost, -1);
  environment.interface = reader.text("GLOO_SOCKET_IFNAME");
  environment.token = reader.token();
  return environment;
}

bool is_in_rank_environment(const Variables& variables) {
  const Reader reader(variables);
  const bool complete = std::ranges::any_of(kLaunchers, [&](const Launcher& one) {
    return !reader.text(one.ranks).empty() && !reader.text(one.rank).empty();
  });
  if (complete) return true;
  // Those of Slurm are there in a batch script too, which is no rank.
  for (const auto& [set, missing] : {std::pair("RANK", "WORLD_SIZE"), std::pair("WORLD_SIZE", "RANK")}) {
    if (reader.text(set).empty()) continue;
    throw RendezvousError(std::string(set) + " is '" + reader.text(set) + "', and " + missing +
                          " is not set: a rank of several processes needs both." + kHint);
  }
  return false;
}

Rendezvous rendezvous(const RankEnvironment& environment, std::chrono::milliseconds timeout,
                      WaitingFunction on_waiting) {
  terminate_with_parent();
  const std::string address =
      environment.one_machine ? kLoopback : address_towards(environment.master_address, environment.master_port);
  if (!environment.one_machine && environment.interface.empty() && (address.empty() || is_loopback(address))) {
    throw RendezvousError("rank " + std::to_string(environment.rank) + " finds " +
                          (address.empty() ? "no way to" : "itself alone at") + " MASTER_ADDR, which is " +
                          environment.master_address +
                          ".\n  Hint: with ranks on several machines it should be an address that all of them reach; a "
                          "number is safest, or name the interface in GLOO_SOCKET_IFNAME.");
  }
  Rendezvous place{.rank = environment.rank,
                   .ranks = environment.ranks,
                   .local_rank = environment.local_rank,
                   .store = make_store(environment, timeout, on_waiting),
                   .address = address,
                   .interface = environment.interface,
                   .token = environment.token,
                   .timeout = timeout,
                   .on_waiting = std::move(on_waiting),
                   .served_port = serves(environment) ? environment.master_port : 0};
  place.store->setTimeout(bounded(timeout));
  // The agent's store is still there when it starts the ranks anew.
  place.store = c10::make_intrusive<c10d::PrefixStore>("penstock/" + std::to_string(environment.attempt), place.store);
  return place;
}

}  // namespace penstock
