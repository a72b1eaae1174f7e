// Ranks that are processes of this machine: the same program, started once for each rank with the environment that
// rendezvous() reads. They are started by exec and never by fork alone, as a fork of a process with threads can do
// little.
//
//   ProcessRanks ranks({.program = "build/bin/train", .ranks = 4});
//   const std::vector<ProcessEnd> ends = ranks.wait(Clock::now() + std::chrono::hours(1));
#pragma once

#include <sys/types.h>

#include <chrono>
#include <map>
#include <string>
#include <vector>

#include "penstock/base/deadline.h"
#include "penstock/transport/sockets.h"

namespace penstock {

namespace internal {
class JobToken;
}

struct ProcessOptions {
  // A path, or a name that is looked for in PATH.
  std::string program;
  std::vector<std::string> arguments;
  int ranks = 1;
  // Besides this process's own and those that rendezvous() reads.
  std::map<std::string, std::string> environment;
  // How long the others may go on after one has failed: they notice it, and say why they end.
  Clock::duration grace = std::chrono::seconds(5);
};

struct ProcessEnd {
  enum class How {
    Running,
    // By itself, with `code`.
    Exited,
    // By signal `code`.
    Signalled,
    // By us, as another had failed or the deadline had passed.
    Killed,
  };
  How how = How::Running;
  int code = 0;

  bool is_good() const { return how == How::Exited && code == 0; }
  friend bool operator==(const ProcessEnd&, const ProcessEnd&) = default;
};
// "exited with 3", "ended by signal 11 (Segmentation fault)", "was killed".
std::string to_string(const ProcessEnd& end);

// Lets the system kill this process when the thread ends whose ProcessRanks has started it, if one has; rendezvous() does
// so.
void terminate_with_parent();

class ProcessRanks {
 public:
  // Starts them with a random job token. They meet at a port of loopback that nobody else can take, as rank 0 inherits its
  // socket. Throws std::runtime_error when the program cannot be started, and leaves none running.
  explicit ProcessRanks(const ProcessOptions& options);
  // Kills those that still run. None is left, neither running nor unreaped.
  ~ProcessRanks();
  ProcessRanks(const ProcessRanks&) = delete;
  ProcessRanks& operator=(const ProcessRanks&) = delete;

  int size() const { return static_cast<int>(processes_.size()); }
  pid_t pid(int rank) const { return processes_.at(static_cast<std::size_t>(rank)).pid; }

  // Returns when all have ended. When one has failed, the others have the grace; at the deadline, nobody has. Ends are
  // in the order of ranks.
  std::vector<ProcessEnd> wait(Deadline deadline);
  // Kills all that still run, and reaps them.
  void kill();

 private:
  struct Process {
    pid_t pid = 0;
    // Becomes readable when the process has ended.
    Descriptor handle;
    ProcessEnd end;
  };

  void start(const ProcessOptions& options, int rank, const Descriptor& socket, const JobToken& token);
  // Waits until one of them ends, or the deadline.
  void wait_for_one(Deadline deadline);
  // Takes note of those that have ended.
  void reap(bool killed);

  std::vector<Process> processes_;
  Clock::duration grace_;
};

}  // namespace penstock
