// Processes that exit while a pipeline is alive, and that are profiled. Each case runs in a process of its own, so that
// memory errors show in its exit status.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "penstock/transport/processes.h"

namespace penstock::internal::testing {
namespace {

int times(int otherwise) {
  const char* value = std::getenv("PENSTOCK_EXITS");
  return value == nullptr ? otherwise : std::atoi(value);
}

class Lifetime : public ::testing::TestWithParam<const char*> {
 protected:
  void expect_to_end_well(const std::vector<std::string>& words) const {
    const std::string carrier = GetParam();
    std::vector<std::string> arguments{carrier};
    arguments.insert(arguments.end(), words.begin(), words.end());
    const std::filesystem::path folder = std::filesystem::read_symlink("/proc/self/exe").parent_path();
    ProcessRanks ranks({.program = folder / "penstock_lifetime_program",
                        .arguments = arguments,
                        .ranks = carrier == "threads" ? 1
                                 : carrier == "gloo"  ? 2
                                                      : 4,
                        // Fill freed memory, so that a use of it is detected.
                        .environment = {{"MALLOC_PERTURB_", "165"}},
                        .grace_period = std::chrono::seconds(30)});
    for (const ProcessEnd& end : ranks.wait(Clock::now() + std::chrono::seconds(120))) {
      EXPECT_EQ(to_string(end), "exited with 0");
    }
  }
};

TEST_P(Lifetime, EndsWithAPipelineOnTheStack) {
  for (int i = 0; i < times(4); ++i) expect_to_end_well({"exit"});
}

TEST_P(Lifetime, EndsWithAPipelineThatIsNeverDestroyed) {
  for (int i = 0; i < times(4); ++i) expect_to_end_well({"leak"});
}

TEST_P(Lifetime, OfAProfileIsAnyPartOfThatOfAPipeline) {
  for (int seed = 1; seed <= times(3); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    expect_to_end_well({"profile", std::to_string(seed)});
  }
}

INSTANTIATE_TEST_SUITE_P(Carriers, Lifetime, ::testing::Values("threads", "gloo"),
                         [](const auto& one) { return std::string(one.param); });

// Groups and messages of device tensors have threads of their own.
class LifetimeOnDevices : public Lifetime {};

TEST_P(LifetimeOnDevices, EndsWithAPipelineOnTheStack) {
  for (int i = 0; i < times(2); ++i) expect_to_end_well({"exit"});
}

TEST_P(LifetimeOnDevices, EndsWithAPipelineThatIsNeverDestroyed) {
  for (int i = 0; i < times(2); ++i) expect_to_end_well({"leak"});
}

INSTANTIATE_TEST_SUITE_P(Carriers, LifetimeOnDevices, ::testing::Values("staged", "direct"),
                         [](const auto& one) { return std::string(one.param); });

// With process ranks, the other processes would report a rank that exits in the middle of a step.
class LifetimeOfThreadRanks : public Lifetime {};

TEST_P(LifetimeOfThreadRanks, EndsWhileAnotherThreadIsInAStep) {
  for (int i = 0; i < times(4); ++i) expect_to_end_well({"exit-in-step"});
}

TEST_P(LifetimeOfThreadRanks, EndsWhenAStaticObjectWaitsForAThreadThatIsInAStep) {
  expect_to_end_well({"join-at-exit"});
}

INSTANTIATE_TEST_SUITE_P(Carriers, LifetimeOfThreadRanks, ::testing::Values("threads"),
                         [](const auto& one) { return std::string(one.param); });

}  // namespace
}  // namespace penstock::internal::testing
