#include "penstock/transport/processes.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>  // NOLINT(modernize-deprecated-headers): sigset_t and its functions are POSIX's
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string_view>

#include "penstock/base/text.h"
#include "penstock/transport/job_token.h"
#include "penstock/transport/sockets.h"

namespace penstock {
namespace {

using internal::concat;
using internal::Descriptor;
using internal::JobToken;
using internal::kLoopback;
using internal::system_reason;

// Tells ranks the process id of their parent.
constexpr const char* kParent = "PENSTOCK_STARTED_BY";

// Returns this process's variables without those that would lead the ranks to another rendezvous.
std::map<std::string, std::string> inherited_environment() {
  std::map<std::string, std::string> variables;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const std::size_t separator = text.find('=');
    if (separator == std::string_view::npos || text.starts_with("TORCHELASTIC_")) continue;
    variables.emplace(text.substr(0, separator), text.substr(separator + 1));
  }
  variables.erase("PENSTOCK_LISTENING_FD");
  return variables;
}

// Returns the null-terminated array that posix_spawn takes. It points into `texts`, which must outlive it.
std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (std::string& text : texts) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

// Owns the file actions and attributes of posix_spawn.
class SpawnSettings {
 public:
  SpawnSettings() {
    posix_spawn_file_actions_init(&actions);
    posix_spawnattr_init(&attributes);
    // No signal is blocked or ignored in the ranks, even if it is on this thread.
    sigset_t none;
    sigset_t all;
    sigemptyset(&none);
    sigfillset(&all);
    posix_spawnattr_setsigmask(&attributes, &none);
    posix_spawnattr_setsigdefault(&attributes, &all);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  }
  ~SpawnSettings() {
    posix_spawn_file_actions_destroy(&actions);
    posix_spawnattr_destroy(&attributes);
  }
  SpawnSettings(const SpawnSettings&) = delete;
  SpawnSettings& operator=(const SpawnSettings&) = delete;

  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
};

}  // namespace

std::string to_string(const ProcessEnd& end) {
  switch (end.how) {
    case ProcessEnd::How::Running: return "is running";
    case ProcessEnd::How::Exited: return concat("exited with ", end.code);
    case ProcessEnd::How::Killed: return "was killed";
    case ProcessEnd::How::Signalled: break;
  }
  return concat("ended by signal ", end.code, " (", strsignal(end.code), ")");
}

void terminate_with_parent() {
  const char* text = std::getenv(kParent);
  const auto parent = static_cast<pid_t>(text == nullptr ? 0 : std::atol(text));
  if (parent <= 0) return;
  if (::getppid() == parent) ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  // The parent may have ended before the call.
  if (::kill(parent, 0) != 0 && errno == ESRCH) ::raise(SIGKILL);
}

class ProcessRanks::Processes {
 public:
  explicit Processes(Clock::duration grace_period) : grace_period_(grace_period) {}

  // Starts one more rank. Only rank 0 inherits `socket`.
  void start(const ProcessOptions& options, int rank, const Descriptor& socket, const JobToken& token);
  std::vector<ProcessEnd> wait(Deadline deadline);
  void kill();

  int size() const { return static_cast<int>(processes_.size()); }
  pid_t pid(int rank) const { return processes_.at(static_cast<std::size_t>(rank)).pid; }

 private:
  struct Process {
    pid_t pid = 0;
    // A pidfd, which becomes readable when the process has ended.
    Descriptor handle;
    ProcessEnd end;
  };

  // Blocks until one of the processes ends, or until the deadline.
  void wait_for_one(Deadline deadline) const;
  // Reaps the processes that have ended and records how. `killed` tells if kill() has been called.
  void reap(bool killed);

  std::vector<Process> processes_;
  Clock::duration grace_period_;
};

void ProcessRanks::Processes::start(const ProcessOptions& options, int rank, const Descriptor& socket,
                                    const JobToken& token) {
  std::map<std::string, std::string> variables = inherited_environment();
  for (const auto& [name, value] : options.environment) variables[name] = value;
  const std::string count = std::to_string(options.ranks);
  variables["RANK"] = variables["LOCAL_RANK"] = std::to_string(rank);
  variables["WORLD_SIZE"] = variables["LOCAL_WORLD_SIZE"] = count;
  variables[kParent] = std::to_string(::getpid());
  variables["MASTER_ADDR"] = kLoopback;
  variables["MASTER_PORT"] = std::to_string(internal::port_of(socket));
  variables["PENSTOCK_JOB_TOKEN"] = token.secret();

  SpawnSettings settings;
  if (rank == 0) {
    // Duplicating a descriptor to itself clears its close-on-exec flag, in this one child only.
    posix_spawn_file_actions_adddup2(&settings.actions, socket.number(), socket.number());
    variables["PENSTOCK_LISTENING_FD"] = std::to_string(socket.number());
  }

  std::vector<std::string> arguments{options.program};
  arguments.insert(arguments.end(), options.arguments.begin(), options.arguments.end());
  std::vector<std::string> assignments;
  for (const auto& [name, value] : variables) assignments.push_back(name + "=" + value);

  pid_t pid = 0;
  const int failed = posix_spawnp(&pid, options.program.c_str(), &settings.actions, &settings.attributes,
                                  pointers(arguments).data(), pointers(assignments).data());
  if (failed != 0) {
    throw std::runtime_error(
        concat("'", options.program, "' cannot be started as rank ", rank, ": ", system_reason(failed), "."));
  }
  Process& process = processes_.emplace_back();
  process.pid = pid;
  // The process id cannot have been reused, as the process has not been reaped.
  process.handle.reset(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  if (!process.handle.is_open()) {
    throw std::runtime_error(concat("rank ", rank, " cannot be watched: ", system_reason(errno), "."));
  }
}

void ProcessRanks::Processes::reap(bool killed) {
  for (Process& process : processes_) {
    if (process.end.how != ProcessEnd::How::Running) continue;
    int status = 0;
    const pid_t found = ::waitpid(process.pid, &status, WNOHANG);
    if (found == 0) continue;
    if (found != process.pid) {
      // Other code of this process has reaped it, so its status is lost.
      process.end = {.how = ProcessEnd::How::Killed, .code = 0};
    } else if (WIFEXITED(status)) {
      process.end = {.how = ProcessEnd::How::Exited, .code = WEXITSTATUS(status)};
    } else if (killed && WTERMSIG(status) == SIGKILL) {
      process.end = {.how = ProcessEnd::How::Killed, .code = SIGKILL};
    } else {
      process.end = {.how = ProcessEnd::How::Signalled, .code = WTERMSIG(status)};
    }
    process.handle.reset();
  }
}

void ProcessRanks::Processes::wait_for_one(Deadline deadline) const {
  std::vector<pollfd> handles;
  for (const Process& process : processes_) {
    if (process.handle.is_open()) handles.push_back({.fd = process.handle.number(), .events = POLLIN, .revents = 0});
  }
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
  const auto timeout = std::clamp(left, std::chrono::milliseconds(0), std::chrono::milliseconds(1'000'000));
  ::poll(handles.data(), handles.size(), static_cast<int>(timeout.count()));
}

std::vector<ProcessEnd> ProcessRanks::Processes::wait(Deadline deadline) {
  const auto any = [this](const auto& holds) {
    return std::any_of(processes_.begin(), processes_.end(),
                       [&](const Process& process) { return holds(process.end); });
  };
  bool failed = false;
  for (;;) {
    reap(/*killed=*/false);
    if (!any([](const ProcessEnd& end) { return end.how == ProcessEnd::How::Running; })) break;
    if (!failed && any([](const ProcessEnd& end) { return end.how != ProcessEnd::How::Running && !end.succeeded(); })) {
      failed = true;
      deadline = std::min(deadline, Clock::now() + grace_period_);
    }
    if (Clock::now() >= deadline) {
      kill();
      break;
    }
    wait_for_one(deadline);
  }
  std::vector<ProcessEnd> ends;
  for (const Process& process : processes_) ends.push_back(process.end);
  return ends;
}

void ProcessRanks::Processes::kill() {
  reap(/*killed=*/false);
  for (const Process& process : processes_) {
    if (process.end.how == ProcessEnd::How::Running) ::kill(process.pid, SIGKILL);
  }
  for (const Process& process : processes_) {
    // SIGKILL also ends a stopped process, so this waits for the system only.
    while (process.end.how == ProcessEnd::How::Running) {
      siginfo_t info{};
      ::waitid(P_PID, static_cast<id_t>(process.pid), &info, WEXITED | WNOWAIT);
      reap(/*killed=*/true);
    }
  }
}

ProcessRanks::ProcessRanks(const ProcessOptions& options)
    : processes_(std::make_unique<Processes>(options.grace_period)) {
  if (options.ranks < 1) {
    throw std::invalid_argument(concat("there are ", options.ranks, " ranks to start, expected one at least."));
  }
  const Descriptor socket = internal::listen_on(kLoopback, 0);
  const JobToken token = JobToken::random();
  try {
    for (int rank = 0; rank < options.ranks; ++rank) processes_->start(options, rank, socket, token);
  } catch (...) {
    kill();
    throw;
  }
}

ProcessRanks::~ProcessRanks() {
  kill();
}

int ProcessRanks::size() const {
  return processes_->size();
}

pid_t ProcessRanks::pid(int rank) const {
  return processes_->pid(rank);
}

std::vector<ProcessEnd> ProcessRanks::wait(Deadline deadline) {
  return processes_->wait(deadline);
}

void ProcessRanks::kill() {
  processes_->kill();
}

}  // namespace penstock
