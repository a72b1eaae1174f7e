#include "penstock/transport/rendezvous.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <limits>
#include <string_view>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

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

c10::intrusive_ptr<c10d::Store> make_store(const RankEnvironment& environment, Deadline deadline) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(environment.master_port);
  options.isServer = environment.rank == 0 && !environment.agent_serves;
  options.waitWorkers = false;
  Descriptor socket;
  if (options.isServer) {
    socket = listening_socket(environment);
    options.masterListenFd = socket.number();
  } else if (const std::string why = why_unreachable(environment.master_address, environment.master_port, deadline);
             !why.empty()) {
    throw RendezvousError("rank " + std::to_string(environment.rank) +
                          " cannot reach MASTER_ADDR:MASTER_PORT, which is " + place_of(environment) + ": " + why +
                          ".\n  Hint: rank 0 has to be running there, on an address that the other ranks can reach.");
  }
  options.timeout =
      std::max(std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()), std::chrono::milliseconds(1000));
  try {
    auto store = c10::make_intrusive<c10d::TCPStore>(environment.master_address, options);
    // The store's from here on.
    socket.release();
    return store;
  } catch (const c10::Error& error) {
    const std::string what = error.what_without_backtrace();
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
  return environment;
}

bool is_in_rank_environment(const Variables& variables) {
  const Reader reader(variables);
  return std::ranges::any_of(kLaunchers, [&](const Launcher& one) {
    return !reader.text(one.ranks).empty() && !reader.text(one.rank).empty();
  });
}

Rendezvous rendezvous(const RankEnvironment& environment, Clock::duration timeout) {
  end_with_starter();
  const Deadline deadline = Clock::now() + timeout;
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
                   .store = make_store(environment, deadline),
                   .address = address,
                   .interface = environment.interface};
  place.store->setTimeout(std::chrono::ceil<std::chrono::milliseconds>(timeout));
  // The agent's store is still there when it starts the ranks anew.
  place.store = c10::make_intrusive<c10d::PrefixStore>("penstock/" + std::to_string(environment.attempt), place.store);
  return place;
}

}  // namespace penstock
