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

#include "penstock/transport/job_token.h"

namespace penstock {
namespace {

// Tells ranks which process has started them.
constexpr const char* kStarter = "PENSTOCK_STARTED_BY";

// This process's variables, without those that would send the ranks to another meeting.
std::map<std::string, std::string> own_environment() {
  std::map<std::string, std::string> variables;
  for (char** one = environ; *one != nullptr; ++one) {
    const std::string_view text(*one);
    const std::size_t at = text.find('=');
    if (at == std::string_view::npos || text.starts_with("TORCHELASTIC_")) continue;
    variables.emplace(text.substr(0, at), text.substr(at + 1));
  }
  variables.erase("PENSTOCK_LISTENING_FD");
  return variables;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> all;
  for (std::string& text : texts) all.push_back(text.data());
  all.push_back(nullptr);
  return all;
}

// What posix_spawn is told besides the program.
class SpawnSettings {
 public:
  SpawnSettings() {
    posix_spawn_file_actions_init(&actions);
    posix_spawnattr_init(&attributes);
    // The ranks start with no signal blocked or ignored, whatever this thread does with them.
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
    case ProcessEnd::How::Exited: return "exited with " + std::to_string(end.code);
    case ProcessEnd::How::Killed: return "was killed";
    case ProcessEnd::How::Signalled: break;
  }
  return "ended by signal " + std::to_string(end.code) + " (" + strsignal(end.code) + ")";
}

void terminate_with_parent() {
  const char* text = std::getenv(kStarter);
  const auto starter = static_cast<pid_t>(text == nullptr ? 0 : std::atol(text));
  if (starter <= 0) return;
  if (::getppid() == starter) ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  // It may have ended before.
  if (::kill(starter, 0) != 0 && errno == ESRCH) ::raise(SIGKILL);
}

ProcessRanks::ProcessRanks(const ProcessOptions& options) : grace_(options.grace) {
  if (options.ranks < 1) {
    throw std::invalid_argument("there are " + std::to_string(options.ranks) +
                                " ranks to start, expected one at least.");
  }
  const Descriptor socket = listen_on(kLoopback, 0);
  const JobToken token = JobToken::random();
  try {
    for (int rank = 0; rank < options.ranks; ++rank) start(options, rank, socket, token);
  } catch (...) {
    kill();
    throw;
  }
}

ProcessRanks::~ProcessRanks() {
  kill();
}

void ProcessRanks::start(const ProcessOptions& options, int rank, const Descriptor& socket, const JobToken& token) {
  std::map<std::string, std::string> variables = own_environment();
  for (const auto& [name, value] : options.environment) variables[name] = value;
  const std::string count = std::to_string(options.ranks);
  variables["RANK"] = variables["LOCAL_RANK"] = std::to_string(rank);
  variables["WORLD_SIZE"] = variables["LOCAL_WORLD_SIZE"] = count;
  variables[kStarter] = std::to_string(::getpid());
  variables["MASTER_ADDR"] = kLoopback;
  variables["MASTER_PORT"] = std::to_string(port_of(socket));
  variables["PENSTOCK_JOB_TOKEN"] = token.secret();

  SpawnSettings settings;
  if (rank == 0) {
    // To itself: that keeps it open in this one process, and nothing else is inherited.
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
    throw std::runtime_error("'" + options.program + "' cannot be started as rank " + std::to_string(rank) + ": " +
                             system_reason(failed) + ".");
  }
  Process& process = processes_.emplace_back();
  process.pid = pid;
  // It cannot be another process by now, as this one is not reaped.
  process.handle.reset(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  if (!process.handle.is_open()) {
    throw std::runtime_error("rank " + std::to_string(rank) + " cannot be watched: " + system_reason(errno) + ".");
  }
}

void ProcessRanks::reap(bool killed) {
  for (Process& process : processes_) {
    if (process.end.how != ProcessEnd::How::Running) continue;
    int status = 0;
    const pid_t found = ::waitpid(process.pid, &status, WNOHANG);
    if (found == 0) continue;
    if (found != process.pid) {
      // Somebody else has reaped it, and how it ended is lost.
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

void ProcessRanks::wait_for_one(Deadline deadline) {
  std::vector<pollfd> handles;
  for (const Process& process : processes_) {
    if (process.handle.is_open()) handles.push_back({.fd = process.handle.number(), .events = POLLIN, .revents = 0});
  }
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
  const auto most = std::clamp(left, std::chrono::milliseconds(0), std::chrono::milliseconds(1'000'000));
  ::poll(handles.data(), handles.size(), static_cast<int>(most.count()));
}

std::vector<ProcessEnd> ProcessRanks::wait(Deadline deadline) {
  const auto any = [this](const auto& holds) {
    return std::any_of(processes_.begin(), processes_.end(), [&](const Process& one) { return holds(one.end); });
  };
  bool failed = false;
  for (;;) {
    reap(/*killed=*/false);
    if (!any([](const ProcessEnd& end) { return end.how == ProcessEnd::How::Running; })) break;
    if (!failed && any([](const ProcessEnd& end) { return end.how != ProcessEnd::How::Running && !end.is_good(); })) {
      failed = true;
      deadline = std::min(deadline, Clock::now() + grace_);
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

void ProcessRanks::kill() {
  reap(/*killed=*/false);
  for (const Process& process : processes_) {
    if (process.end.how == ProcessEnd::How::Running) ::kill(process.pid, SIGKILL);
  }
  for (const Process& process : processes_) {
    // Also of one that is stopped nothing is left to wait for but the system.
    while (process.end.how == ProcessEnd::How::Running) {
      siginfo_t info{};
      ::waitid(P_PID, static_cast<id_t>(process.pid), &info, WEXITED | WNOWAIT);
      reap(/*killed=*/true);
    }
  }
}

}  // namespace penstock
