// Process ranks that are killed or stopped in the middle of a step.
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "penstock/schedule/generators.h"
#include "penstock/schedule/passes.h"
#include "penstock/transport/processes.h"
#include "tests/runtime/victim.h"

namespace penstock::internal::testing {
namespace {

int number_from(const char* variable, int otherwise) {
  const char* value = std::getenv(variable);
  return value == nullptr ? otherwise : std::atoi(value);
}

// Loses ranks of process groups whose tensors are on the CPU, or on devices if there is a carrier.
void lose_ranks(const std::string& carrier) {
  constexpr int kRanks = 4;
  constexpr int kTimeoutMs = 2000;
  constexpr const char* kSchedules[] = {"1F1B", "GPipe", "ZBVZeroBubble", "Interleaved1F1B"};
  const int times = number_from("PENSTOCK_KILLS", 6);
  const auto seed = static_cast<unsigned>(number_from("PENSTOCK_SEED", 1));
  std::mt19937 random(seed);
  const auto any = [&random](int below) { return std::uniform_int_distribution(0, below - 1)(random); };
  const std::filesystem::path folder = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  const std::string file = std::filesystem::temp_directory_path() / ("penstock_lost_rank_" + std::to_string(getpid()));
  for (int i = 0; i < times; ++i) {
    const std::string schedule = kSchedules[static_cast<std::size_t>(any(4))];
    const int victim = i % kRanks;
    const int signal = i / kRanks % 2 == 0 ? SIGKILL : SIGSTOP;
    const Schedule lowered = lower(generate(schedule, {.ranks = kRanks, .microbatches = 4}));
    const auto actions = lowered.actions(victim);
    const int step = any(3);
    const int action = any(static_cast<int>(actions.size()));
    SCOPED_TRACE(schedule + ", signal " + std::to_string(signal) + " to rank " + std::to_string(victim) + " in step " +
                 std::to_string(step) + " at " + to_string(actions[static_cast<std::size_t>(action)]) +
                 ", PENSTOCK_SEED=" + std::to_string(seed));
    std::vector<std::string> arguments{std::to_string(signal),
                                       std::to_string(victim),
                                       std::to_string(step),
                                       std::to_string(action),
                                       std::to_string(kTimeoutMs),
                                       file,
                                       schedule};
    if (!carrier.empty()) arguments.push_back(carrier);
    ProcessRanks ranks({.program = folder / "penstock_victim",
                        .arguments = arguments,
                        .ranks = kRanks,
                        .environment = {},
                        // The other ranks exit by themselves; a stopped one does not.
                        .grace_period = std::chrono::seconds(4)});
    const std::vector<ProcessEnd> ends = ranks.wait(Clock::now() + std::chrono::seconds(60));
    for (int rank = 0; rank < kRanks; ++rank) {
      const ProcessEnd& end = ends[static_cast<std::size_t>(rank)];
      if (rank != victim) {
        EXPECT_EQ(to_string(end), "exited with " + std::to_string(kNoticed)) << "rank " << rank;
      } else {
        EXPECT_EQ(end.how, signal == SIGKILL ? ProcessEnd::How::Signalled : ProcessEnd::How::Killed);
      }
    }
  }
  std::filesystem::remove(file);
  std::cout << times << " ranks lost\n";
}

TEST(LostRank, IsNoticedByAllOthersWhateverItWasDoing) {
  lose_ranks("");
}
TEST(LostRank, IsNoticedWhenDeviceTensorsAreSentFromCpuMemory) {
  lose_ranks("staged");
}
TEST(LostRank, IsNoticedWhenTensorsAreSentFromDeviceToDevice) {
  lose_ranks("direct");
}

}  // namespace
}  // namespace penstock::internal::testing
