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

#include "penstock/base/deadline.h"
#include "penstock/base/text.h"
#include "penstock/tensor/reason.h"
#include "penstock/transport/child_sockets.h"
#include "penstock/transport/membership.h"
#include "penstock/transport/processes.h"
#include "penstock/transport/sockets.h"

namespace penstock {
namespace {

using internal::Answer;
using internal::concat;
using internal::Descriptor;
using internal::kLoopback;
using internal::NewSockets;
using internal::reason_of;
using internal::seconds_text;
using internal::WaitingLines;

constexpr const char* kHint =
    "\n  Hint: whatever starts the ranks, such as torchrun, sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.";

// Names of a launcher's variables.
struct Launcher {
  const char* rank;
  const char* ranks;
  const char* local_rank;
  const char* local_ranks;
};
// The first launcher whose rank and world size are set is used.
constexpr std::array kLaunchers{
    Launcher{"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    // srun sets both of the first two. A batch script has only SLURM_PROCID, and is no rank.
    Launcher{"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"},
    Launcher{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
             "OMPI_COMM_WORLD_LOCAL_SIZE"},
    Launcher{"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"}};

// Returns the first node of a Slurm node list: node03 for "node[03-05,07],other".
std::string first_node(const std::string& list) {
  const std::size_t bracket = list.find('[');
  if (bracket == std::string::npos || list.find(',') < bracket) return list.substr(0, list.find(','));
  const std::size_t end = list.find_first_of("-,]", bracket);
  return list.substr(0, bracket) + list.substr(bracket + 1, end == std::string::npos ? end : end - bracket - 1);
}

// Reads and checks environment variables.
class Reader {
 public:
  explicit Reader(const Variables& variables) : variables_(variables) {}

  // Returns an empty text if the variable is not set.
  std::string text(const char* name) const {
    const char* value = variables_ ? variables_(name) : std::getenv(name);
    return value == nullptr ? "" : value;
  }

  const Launcher& launcher() const {
    for (const Launcher& launcher : kLaunchers) {
      if (!text(launcher.ranks).empty() && !text(launcher.rank).empty()) return launcher;
    }
    return kLaunchers.front();
  }

  std::string job_token() const {
    std::string secret = text("PENSTOCK_JOB_TOKEN");
    if (secret.empty()) secret = text("TORCHELASTIC_RUN_ID");
    // With RANK and WORLD_SIZE set by hand, several steps of a Slurm job may be ranks of one run, so the step does not
    // count.
    if (secret.empty() && std::string_view(launcher().rank) == "SLURM_PROCID") {
      secret = text("SLURM_JOB_ID") + "." + text("SLURM_STEP_ID");
    }
    return secret;
  }

  // Returns a port that other jobs of the machine are unlikely to use; 0 outside of Slurm.
  int port_of_job() const {
    constexpr int kFirst = 20000;
    constexpr int kCount = 10000;
    const int job =
        text("SLURM_STEP_NUM_TASKS").empty() ? -1 : number("SLURM_JOB_ID", 0, std::numeric_limits<int>::max(), -1);
    return job < 0 ? 0 : kFirst + job % kCount;
  }

  int required(const char* name, int low, int high) const {
    if (text(name).empty()) throw RendezvousError(concat(name, " is not set.", kHint));
    return number(name, low, high, low);
  }

  // Returns `otherwise` if the variable is not set.
  int number(const char* name, int low, int high, int otherwise) const {
    const std::string value = text(name);
    if (value.empty()) return otherwise;
    int result = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), result);
    if (error == std::errc() && end == value.data() + value.size() && result >= low && result <= high) return result;
    const bool open = high == std::numeric_limits<int>::max();
    throw RendezvousError(concat(name, " is '", value, "', expected a number ",
                                 open ? concat("of at least ", low) : concat("from ", low, " to ", high), "."));
  }

 private:
  // Belongs to the caller of the function that the reader is local to.
  const Variables& variables_;
};

bool is_loopback(const std::string& address) {
  return address == "localhost" || address == "::1" || address.starts_with("127.");
}

std::string master_text(const RankEnvironment& environment) {
  return concat(environment.master_address, ':', environment.master_port);
}

// Returns true if this process serves the store.
bool serves(const RankEnvironment& environment) {
  return environment.rank == 0 && !environment.agent_serves;
}

// Replaces bytes that are not printable ASCII by dots.
std::string printable_bytes(std::string bytes) {
  std::ranges::replace_if(bytes, [](char c) { return c < ' ' || c > '~'; }, '.');
  return bytes;
}

Descriptor listening_socket(const RankEnvironment& environment) {
  if (environment.listening_fd >= 0) {
    int listens = 0;
    socklen_t size = sizeof listens;
    if (::getsockopt(environment.listening_fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0 || listens == 0) {
      throw RendezvousError(
          concat("PENSTOCK_LISTENING_FD is '", environment.listening_fd, "', expected a socket that listens."));
    }
    return Descriptor(environment.listening_fd);
  }
  try {
    return internal::listen_on(environment.master_address, environment.master_port);
  } catch (const std::runtime_error& error) {
    throw RendezvousError(concat("rank 0 cannot listen on MASTER_ADDR:MASTER_PORT, which is ", master_text(environment),
                                 ": ", error.what(),
                                 ".\n  Hint: the address should be one of rank 0's machine, and the port free."));
  }
}

// Returns the bytes of a ping, with the validation that c10d's client sends first.
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

// Blocks until the store at the master's address answers a ping. c10d's own client has no deadline for an answer, and
// would block for ever if a program listens there that does not answer.
void require_store(const RankEnvironment& environment, std::chrono::milliseconds timeout,
                   const WaitingFunction& on_waiting) {
  const std::string self = concat("rank ", environment.rank);
  const std::string where = "MASTER_ADDR:MASTER_PORT, which is " + master_text(environment);
  constexpr std::uint32_t kNonce = 0x70656e73;
  const std::string expected(reinterpret_cast<const char*>(&kNonce), sizeof kNonce);  // NOLINT(*-reinterpret-cast)
  WaitingLines lines(on_waiting, timeout);
  const Answer answer = internal::ask(
      environment.master_address, environment.master_port, ping_of_store(kNonce), expected.size(),
      deadline_after(timeout), [&](const std::string& why) {
        lines.waiting([&] { return concat(self, " waits for rank 0 at ", master_text(environment), ": ", why); });
      });
  if (answer.bytes == expected) return;
  constexpr const char* kOtherProgram =
      ".\n  Hint: the port belongs to another program; choose a free one as MASTER_PORT for all ranks.";
  if (!answer.bytes.empty()) {
    throw RendezvousError(concat(self, " found no store at ", where, ": the program that listens there answered '",
                                 printable_bytes(answer.bytes), "' to a ping", kOtherProgram));
  }
  if (answer.connected) {
    throw RendezvousError(concat(
        self, " found no store at ", where, ": the program that listens there has not answered a ping within ",
        seconds_text(timeout), " (", answer.why,
        ").\n  Hint: check that rank 0 has started; if it has, the port belongs to another program, and all ranks "
        "need a free one as MASTER_PORT."));
  }
  throw RendezvousError(
      concat(self, " cannot reach ", where, ", within ", seconds_text(timeout), ": ", answer.why,
             ".\n  Hint: rank 0 has to be running there, on an address that the other ranks can reach."));
}

c10::intrusive_ptr<c10d::Store> make_store(const RankEnvironment& environment, std::chrono::milliseconds timeout,
                                           const WaitingFunction& on_waiting) {
  const Deadline deadline = deadline_after(timeout);
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(environment.master_port);
  options.isServer = serves(environment);
  options.waitWorkers = false;
  // The store uses a few descriptors for its threads, and one for the connection of each rank.
  constexpr int kStoreDescriptors = 16;
  try {
    internal::require_descriptors(kStoreDescriptors + (options.isServer ? environment.ranks : 0));
  } catch (const std::runtime_error& error) {
    throw RendezvousError(concat("rank ", environment.rank, ": ", error.what()));
  }
  const NewSockets sockets;
  Descriptor socket;
  if (options.isServer) {
    socket = listening_socket(environment);
    internal::close_in_children(socket.number());
    options.masterListenFd = socket.number();
  } else {
    require_store(environment, timeout, on_waiting);
  }
  options.timeout =
      std::max(std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()), std::chrono::milliseconds(1000));
  try {
    auto store = c10::make_intrusive<c10d::TCPStore>(environment.master_address, options);
    // The store owns the socket now.
    socket.release();
    sockets.close_in_children();
    return store;
  } catch (const std::system_error& error) {
    throw RendezvousError(concat("rank ", environment.rank,
                                 " cannot start the thread of the store: ", error.code().message(),
                                 ".\n  Hint: `ulimit -u N` allows more threads and processes."));
  } catch (const std::exception& error) {
    const std::string what = reason_of(error);
    throw RendezvousError(concat("rank ", environment.rank, " found no store at ", master_text(environment), ": ",
                                 what.substr(0, what.find('\n'))));
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
  // srun's value for several nodes, such as "4(x2)", is not a number.
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
  environment.job_token = reader.job_token();
  return environment;
}

bool is_in_rank_environment(const Variables& variables) {
  const Reader reader(variables);
  const bool complete = std::ranges::any_of(kLaunchers, [&](const Launcher& launcher) {
    return !reader.text(launcher.ranks).empty() && !reader.text(launcher.rank).empty();
  });
  if (complete) return true;
  // Only torchrun's names are checked: SLURM_PROCID is also set in a batch script, which is no rank.
  for (const auto& [set, missing] : {std::pair("RANK", "WORLD_SIZE"), std::pair("WORLD_SIZE", "RANK")}) {
    if (reader.text(set).empty()) continue;
    throw RendezvousError(concat(set, " is '", reader.text(set), "', and ", missing,
                                 " is not set: a rank of several processes needs both.", kHint));
  }
  return false;
}

Rendezvous rendezvous(const RankEnvironment& environment, std::chrono::milliseconds timeout,
                      WaitingFunction on_waiting) {
  terminate_with_parent();
  const std::string address = environment.one_machine
                                  ? kLoopback
                                  : internal::address_towards(environment.master_address, environment.master_port);
  if (!environment.one_machine && environment.interface.empty() && (address.empty() || is_loopback(address))) {
    throw RendezvousError(concat(
        "rank ", environment.rank, address.empty() ? " has no route to" : " resolves", " MASTER_ADDR, which is ",
        environment.master_address, address.empty() ? "" : ", to loopback, which other machines cannot reach",
        ".\n  Hint: with ranks on several machines, MASTER_ADDR should be an address that all of them can reach; a "
        "numeric one is safest. Or name the interface in GLOO_SOCKET_IFNAME."));
  }
  Rendezvous result{.rank = environment.rank,
                    .ranks = environment.ranks,
                    .local_rank = environment.local_rank,
                    .store = make_store(environment, timeout, on_waiting),
                    .address = address,
                    .interface = environment.interface,
                    .job_token = environment.job_token,
                    .timeout = timeout,
                    .on_waiting = std::move(on_waiting),
                    .served_port = serves(environment) ? environment.master_port : 0};
  result.store->setTimeout(bounded(timeout));
  // The agent's store survives a restart of the ranks, so each attempt has a prefix of its own.
  result.store = c10::make_intrusive<c10d::PrefixStore>(concat("penstock/", environment.attempt), result.store);
  return result;
}

}  // namespace penstock
