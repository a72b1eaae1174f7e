#include "penstock/cli/interruption.h"

#include <signal.h>  // NOLINT(modernize-deprecated-headers): sigaction is POSIX's
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>

namespace penstock::internal::cli {
namespace {

constexpr auto kSameEvent = std::chrono::milliseconds(250);
constexpr std::size_t kMaxRanks = 4096;

// State of the signal handler, which may use lock-free atomics alone.
std::atomic<int> num_interruptions = 0;
std::atomic<int> first_signal = SIGINT;
std::atomic<Clock::rep> last_signal_time = 0;
std::atomic<std::size_t> num_ranks = 0;
std::array<std::atomic<pid_t>, kMaxRanks> forwarded_to;
static_assert(std::atomic<Clock::rep>::is_always_lock_free && std::atomic<pid_t>::is_always_lock_free);

void note_interruption(int signal) {
  const Clock::rep now = Clock::now().time_since_epoch().count();
  if (num_interruptions > 0 && now - last_signal_time < Clock::duration(kSameEvent).count()) return;
  last_signal_time = now;
  const bool again = ++num_interruptions > 1;
  if (!again) first_signal = signal;
  if (again && num_ranks == 0) ::_exit(interruption_code());
  for (std::size_t i = 0; i < num_ranks; ++i) ::kill(forwarded_to[i], again ? SIGKILL : signal);
}

void handle_with(void (*handler)(int)) {
  struct sigaction action{};
  action.sa_handler = handler;
  ::sigaction(SIGINT, &action, nullptr);
  ::sigaction(SIGTERM, &action, nullptr);
}

}  // namespace

void catch_interruptions() {
  handle_with(note_interruption);
}

int interruptions() {
  return num_interruptions;
}

int interruption_code() {
  constexpr int kSignalled = 128;
  return kSignalled + first_signal;
}

ForwardedInterruptions::ForwardedInterruptions(const ProcessRanks& ranks) {
  const std::size_t count = std::min(static_cast<std::size_t>(ranks.size()), kMaxRanks);
  for (std::size_t i = 0; i < count; ++i) forwarded_to[i] = ranks.pid(static_cast<int>(i));
  num_ranks = count;
  catch_interruptions();
}

ForwardedInterruptions::~ForwardedInterruptions() {
  handle_with(SIG_DFL);
  num_ranks = 0;
}

}  // namespace penstock::internal::cli
