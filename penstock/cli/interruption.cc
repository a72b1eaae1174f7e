#include "penstock/cli/interruption.h"

#include <signal.h>  // NOLINT(modernize-deprecated-headers): sigaction is POSIX's
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>

namespace penstock::cli {
namespace {

constexpr auto kMoment = std::chrono::milliseconds(250);
constexpr std::size_t kMostRanks = 4096;

// A handler may touch nothing but these.
std::atomic<int> count = 0;
std::atomic<int> first_signal = SIGINT;
std::atomic<Clock::rep> last = 0;
std::atomic<std::size_t> num_ranks = 0;
std::array<std::atomic<pid_t>, kMostRanks> ranks_to_tell;
static_assert(std::atomic<Clock::rep>::is_always_lock_free && std::atomic<pid_t>::is_always_lock_free);

void note_interruption(int signal) {
  const Clock::rep now = Clock::now().time_since_epoch().count();
  if (count > 0 && now - last < Clock::duration(kMoment).count()) return;
  last = now;
  const bool again = ++count > 1;
  if (!again) first_signal = signal;
  if (again && num_ranks == 0) ::_exit(interruption_code());
  for (std::size_t i = 0; i < num_ranks; ++i) ::kill(ranks_to_tell[i], again ? SIGKILL : signal);
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
  return count;
}

int interruption_code() {
  constexpr int kSignalled = 128;
  return kSignalled + first_signal;
}

PassedOnInterruptions::PassedOnInterruptions(const ProcessRanks& ranks) {
  const std::size_t told = std::min(static_cast<std::size_t>(ranks.size()), kMostRanks);
  for (std::size_t i = 0; i < told; ++i) ranks_to_tell[i] = ranks.pid(static_cast<int>(i));
  num_ranks = told;
  catch_interruptions();
}

PassedOnInterruptions::~PassedOnInterruptions() {
  handle_with(SIG_DFL);
  num_ranks = 0;
}

}  // namespace penstock::cli
