// Connects process ranks to their c10d store. Each rank reads its place from the environment, as torchrun, Slurm's
// srun, mpirun and ProcessRanks set it.
//
//   const Rendezvous rendezvous = penstock::rendezvous(std::chrono::seconds(30));
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

namespace penstock {

// Thrown for a wrong variable of the environment and for an address that cannot be reached. The message tells what was
// found and what would be right.
class RendezvousError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The place of a rank, as read from the environment. The comments name torchrun's variables. srun and mpirun have other
// names for rank, world size and their local counterparts; without MASTER_ADDR and MASTER_PORT, srun's first node is
// the master, and the port is derived from the job number.
struct RankEnvironment {
  int rank = 0;                // RANK
  int ranks = 1;               // WORLD_SIZE
  int local_rank = 0;          // LOCAL_RANK, or RANK
  bool one_machine = false;    // LOCAL_WORLD_SIZE is WORLD_SIZE, or the master is on loopback
  std::string master_address;  // MASTER_ADDR, or 127.0.0.1
  int master_port = 0;         // MASTER_PORT
  bool agent_serves = false;   // TORCHELASTIC_USE_AGENT_STORE is True: torchrun's agent serves the store
  int attempt = 0;             // TORCHELASTIC_RESTART_COUNT, or 0
  int listening_fd = -1;       // PENSTOCK_LISTENING_FD, for rank 0: a socket that listens on the port
  std::string interface;       // GLOO_SOCKET_IFNAME, or empty
  // PENSTOCK_JOB_TOKEN, or an id of the job: torchrun's run id, or the numbers of srun's job and step.
  std::string job_token = {};
};

// Returns the value of an environment variable, or nullptr.
using Variables = std::function<const char*(const char* name)>;
// Reads the place of this rank, from the environment of the process unless `variables` is given. Throws
// RendezvousError.
RankEnvironment read_environment(const Variables& variables = {});
// Returns true if a launcher has started this process as one of several ranks. Throws RendezvousError if RANK is set
// without WORLD_SIZE or the reverse: such a process would run alone, and the others would wait for it.
bool is_in_rank_environment(const Variables& variables = {});

// Receives a line of text from time to time while this process waits for other ranks.
using WaitingFunction = std::function<void(const std::string& line)>;

// A rank that is connected to the store of its job, and the defaults of transports that are created from it.
struct Rendezvous {
  int rank = 0;
  int ranks = 1;
  int local_rank = 0;
  c10::intrusive_ptr<c10d::Store> store;
  // The address and interface for GlooOptions: loopback if all ranks are on one machine; otherwise the local address of
  // the route to the master, or the interface that GLOO_SOCKET_IFNAME names.
  std::string address;
  std::string interface;
  std::string job_token = {};
  // The arguments of rendezvous(), which transports use too.
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
  WaitingFunction on_waiting = {};
  // Port of the store if this process serves it, 0 otherwise.
  int served_port = 0;
};

// Connects this rank to the store, which rank 0 serves on the master's address only, unless torchrun's agent serves it.
// Throws RendezvousError if the store does not answer within the timeout, or if another program answers at its port.
// The timeout and `on_waiting` also apply to transports that are created from the result.
Rendezvous rendezvous(const RankEnvironment& environment, std::chrono::milliseconds timeout = std::chrono::seconds(60),
                      WaitingFunction on_waiting = {});
inline Rendezvous rendezvous(std::chrono::milliseconds timeout = std::chrono::seconds(60),
                             WaitingFunction on_waiting = {}) {
  return rendezvous(read_environment(), timeout, std::move(on_waiting));
}

}  // namespace penstock
