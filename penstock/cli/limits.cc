#include "penstock/cli/limits.h"

#include <signal.h>  // NOLINT(modernize-deprecated-headers): sigaction is POSIX's
#include <sys/resource.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <mutex>
#include <new>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <system_error>

#include "penstock/cli/byte_units.h"
#include "penstock/cli/checks.h"
#include "penstock/cli/command.h"
#include "penstock/cli/terminal.h"
#include "penstock/tensor/reason.h"

namespace penstock::internal::cli {
namespace {

// Allocates nothing and takes no lock, so that signal handlers may call it.
void write_error(std::string_view text) {
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
}

// Message that the handler of the time limit writes. It is formatted before the timer is set.
std::array<char, 128> time_message{};
std::size_t time_message_size = 0;

void exit_at_time_limit(int /*signal*/) {
  write_error({time_message.data(), time_message_size});
  ::_exit(kUsageError);
}

void set_timer(double seconds) {
  // Longer than any run, and within the range of setitimer.
  constexpr double kLongest = 1e8;
  constexpr std::int64_t kSecond = 1'000'000;
  const auto microseconds = static_cast<std::int64_t>(std::ceil(std::min(seconds, kLongest) * 1e6));
  itimerval timer{};
  timer.it_value.tv_sec = static_cast<time_t>(microseconds / kSecond);
  timer.it_value.tv_usec = static_cast<suseconds_t>(microseconds % kSecond);
  if (::setitimer(ITIMER_REAL, &timer, nullptr) == 0) return;
  throw std::runtime_error("--time-limit cannot be set: " + std::generic_category().message(errno) + ".");
}

void limit_time(double seconds) {
  std::ostringstream text;
  text << "penstock: time limit of " << seconds << " s exceeded.\n";
  const std::string message = std::move(text).str();
  time_message_size = message.copy(time_message.data(), time_message.size());
  struct sigaction action{};
  action.sa_handler = exit_at_time_limit;
  ::sigaction(SIGALRM, &action, nullptr);
  set_timer(seconds);
}

// Returns the size of the process's data segment, VmData of /proc/self/status.
std::int64_t data_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    constexpr std::string_view kName = "VmData:";
    constexpr std::int64_t kUnit = 1024;
    if (line.starts_with(kName)) return std::atoll(line.c_str() + kName.size()) * kUnit;
  }
  return 0;
}

// RLIMIT_DATA counts all private writable memory: what a process has loaded of a model, and mapped files with weights.
void limit_memory(double bytes) {
  constexpr double kMost = 1e18;
  rlimit limit{};
  if (::getrlimit(RLIMIT_DATA, &limit) == 0) {
    const rlim_t wanted = static_cast<rlim_t>(data_bytes()) + static_cast<rlim_t>(std::min(bytes, kMost));
    limit.rlim_cur = std::min({wanted, limit.rlim_cur, limit.rlim_max});
    if (::setrlimit(RLIMIT_DATA, &limit) == 0) return;
  }
  throw std::runtime_error("--memory-limit cannot be set: " + std::generic_category().message(errno) + ".");
}

// Terminate handler: prints the exception and exits. It avoids allocation, as memory may be what is missing.
[[noreturn]] void report_and_exit() {
  try {
    if (const std::exception_ptr error = std::current_exception()) std::rethrow_exception(error);
    // An exception that leaves a noexcept function is not the current one.
    write_error(std::uncaught_exceptions() > 0
                    ? "penstock: a thread of this process has failed, most likely because there is not enough memory.\n"
                    : "penstock: a thread of this process has failed with an unknown error.\n");
  } catch (const std::bad_alloc&) {
    write_error("penstock: a thread of this process has failed: not enough memory.\n");
  } catch (const std::exception& error) {
    try {
      write_error("penstock: a thread of this process has failed: " + printable(brief_reason_of(error)) + ".\n");
    } catch (const std::bad_alloc&) {
      write_error("penstock: a thread of this process has failed.\n");
    }
  } catch (...) {
    write_error("penstock: a thread of this process has failed with an exception of unknown type.\n");
  }
  ::_exit(kUsageError);
}

}  // namespace

void LimitOptions::add_to(CLI::App& command) {
  command
      .add_option("--memory-limit", memory,
                  "Memory limit of each process after its start, weights included, such as 2GiB (default: no limit)")
      ->option_text("SIZE")
      ->check(size_in_bytes());
  command.add_option("--time-limit", seconds, "Time limit of the command in seconds (default: no limit)")
      ->option_text("T")
      ->check(duration());
}

void LimitOptions::apply() const {
  static std::once_flag once;
  std::call_once(once, [this] {
    if (!memory.empty()) limit_memory(*parse_bytes(memory));
    if (seconds > 0) limit_time(seconds);
  });
}

void postpone_time_limit(std::chrono::seconds more) {
  itimerval timer{};
  if (time_message_size == 0 || ::getitimer(ITIMER_REAL, &timer) != 0) return;
  set_timer(static_cast<double>(timer.it_value.tv_sec + more.count()) +
            static_cast<double>(timer.it_value.tv_usec) / 1e6);
}

void prepare_process() {
  rlimit files{};
  if (::getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < files.rlim_max) {
    files.rlim_cur = files.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &files);
  }
  std::set_terminate(report_and_exit);
}

}  // namespace penstock::internal::cli
