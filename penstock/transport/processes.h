// Starts process ranks on this machine: the same program once for each rank, with the environment that rendezvous()
// reads. They are started with posix_spawn, as a fork without exec of a multithreaded process cannot use most
// libraries.
//
//   ProcessRanks ranks({.program = "build/bin/train", .ranks = 4});
//   const std::vector<ProcessEnd> ends = ranks.wait(Clock::now() + std::chrono::hours(1));
#pragma once

#include <sys/types.h>

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "penstock/base/deadline.h"

namespace penstock {

struct ProcessOptions {
  // Path of the program, or a name that is looked up in PATH.
  std::string program;
  std::vector<std::string> arguments;
  int ranks = 1;
  // Variables in addition to this process's own and those that rendezvous() reads.
  std::map<std::string, std::string> environment;
  // Time that the other ranks have after one has failed, so that they can detect it and report why they end.
  Clock::duration grace_period = std::chrono::seconds(5);
};

// The end of a process: its exit code or signal.
struct ProcessEnd {
  enum class How {
    Running,
    // The process exited with `code`.
    Exited,
    // Signal `code` ended the process.
    Signalled,
    // ProcessRanks killed the process, because another had failed or the deadline had passed.
    Killed,
  };
  How how = How::Running;
  int code = 0;

  bool succeeded() const { return how == How::Exited && code == 0; }
  friend bool operator==(const ProcessEnd&, const ProcessEnd&) = default;
};
// Returns a text such as "exited with 3", "ended by signal 11 (Segmentation fault)" or "was killed".
std::string to_string(const ProcessEnd& end);

// Makes the system kill this process when the thread that has started it through ProcessRanks ends. Does nothing in a
// process that ProcessRanks has not started. rendezvous() calls it.
void terminate_with_parent();

// Owns the processes: none is left, running or unreaped, when it is destroyed. One thread uses it at a time, and has to
// live as long as the processes.
class ProcessRanks {
 public:
  // Starts the ranks with a random job token. Their rendezvous is at a loopback port that no other process can take, as
  // rank 0 inherits its listening socket. Throws std::runtime_error if the program cannot be started, and leaves none
  // running.
  explicit ProcessRanks(const ProcessOptions& options);
  // Kills the ranks that still run.
  ~ProcessRanks();
  ProcessRanks(const ProcessRanks&) = delete;
  ProcessRanks& operator=(const ProcessRanks&) = delete;

  int size() const;
  pid_t pid(int rank) const;

  // Blocks until all ranks have ended, and returns how, in the order of ranks. Kills the remaining ranks at the
  // deadline, or when the grace period after a failure is over.
  std::vector<ProcessEnd> wait(Deadline deadline);
  // Kills and reaps the ranks that still run.
  void kill();

 private:
  class Processes;
  std::unique_ptr<Processes> processes_;
};

}  // namespace penstock
