// Where the ranks of several processes find one another: the environment that torchrun gives to each of them, or Slurm's
// srun, mpirun or ProcessRanks does.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "penstock/base/deadline.h"
#include "penstock/transport/job_token.h"
#include "penstock/transport/membership.h"

namespace penstock {

// The message says what is wrong with which variable or address, and what would be right.
class RendezvousError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// What the environment says, in the words of torchrun. srun and mpirun have others for the first four; without
// MASTER_ADDR and MASTER_PORT, srun's first node is the master, and the port comes from the job's number.
struct RankEnvironment {
  int rank = 0;                // RANK
  int ranks = 1;               // WORLD_SIZE
  int local_rank = 0;          // LOCAL_RANK, or RANK
  bool one_machine = false;    // LOCAL_WORLD_SIZE is WORLD_SIZE, or the master is on loopback
  std::string master_address;  // MASTER_ADDR, or 127.0.0.1
  int master_port = 0;         // MASTER_PORT
  bool agent_serves = false;   // TORCHELASTIC_USE_AGENT_STORE is True: torchrun's agent has the store
  int attempt = 0;             // TORCHELASTIC_RESTART_COUNT, or 0
  int listening_fd = -1;       // PENSTOCK_LISTENING_FD, for rank 0: a socket that listens on the port
  std::string interface;       // GLOO_SOCKET_IFNAME, or empty
  // PENSTOCK_JOB_TOKEN, or what tells this job from others: torchrun's run id, or the number of srun's job and step.
  JobToken token = JobToken();
};

// The value of a variable, or nullptr.
using Variables = std::function<const char*(const char* name)>;
// Throws RendezvousError. The process's own variables unless others are given.
RankEnvironment read_environment(const Variables& variables = {});
// Returns true when something has started this process as one of several ranks. Throws RendezvousError when RANK is set
// without WORLD_SIZE or the reverse: such a process would run alone, and the others would wait for it.
bool is_in_rank_environment(const Variables& variables = {});

struct Rendezvous {
  int rank = 0;
  int ranks = 1;
  int local_rank = 0;
  c10::intrusive_ptr<c10d::Store> store;
  // For GlooOptions: where this rank listens, which is loopback when all are on one machine, else the address that
  // leads to the master or the interface that was named.
  std::string address;
  std::string interface;
  JobToken token = JobToken();
  // What rendezvous() was given, for transports that are made from this.
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
  WaitingFunction on_waiting = {};
  // The port of the store, when this process serves it; else 0.
  int served_port = 0;
};

// Rank 0 serves the store on the master's address alone, unless torchrun's agent does; the others connect to it. Throws
// RendezvousError when the store does not answer within the timeout, or something else answers at its port. The timeout
// holds for transports that are made from the result too, and `on_waiting` receives a line from time to time while this
// process waits.
Rendezvous rendezvous(const RankEnvironment& environment, std::chrono::milliseconds timeout = std::chrono::seconds(60),
                      WaitingFunction on_waiting = {});
inline Rendezvous rendezvous(std::chrono::milliseconds timeout = std::chrono::seconds(60),
                             WaitingFunction on_waiting = {}) {
  return rendezvous(read_environment(), timeout, std::move(on_waiting));
}

}  // namespace penstock
