// What can be seen of a step from outside: ranges in PyTorch's profiler.
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "penstock/runtime/pipeline.h"
#include "penstock/schedule/generators.h"
#include "tests/runtime/models.h"

namespace penstock::testing {
namespace {

using Names = std::vector<std::string>;

// What the profiler should see of each rank.
std::vector<Names> ranges_of(const Schedule& schedule) {
  std::vector<Names> ranges(static_cast<std::size_t>(schedule.ranks()));
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    for (const Action& action : schedule.actions(rank)) {
      ranges[static_cast<std::size_t>(rank)].push_back("PP:" + to_string(action));
    }
  }
  std::sort(ranges.begin(), ranges.end());
  return ranges;
}

// Threads have no order that could be relied on.
std::vector<Names> sorted_lists(const std::map<std::uint64_t, Names>& by_thread) {
  std::vector<Names> lists;
  for (const auto& [thread, names] : by_thread) lists.push_back(names);
  std::sort(lists.begin(), lists.end());
  return lists;
}

// Writes down the ranges of all threads while it lives.
class Ranges {
 public:
  Ranges() {
    seen().clear();
    handle_ = at::addGlobalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
          const std::lock_guard lock(mutex());
          seen()[at::RecordFunction::currentThreadId()].emplace_back(function.name());
          return nullptr;
        }).scopes({at::RecordScope::USER_SCOPE}));
  }
  ~Ranges() { at::removeCallback(handle_); }
  Ranges(const Ranges&) = delete;
  Ranges& operator=(const Ranges&) = delete;

  static std::map<std::uint64_t, Names>& seen() {
    static std::map<std::uint64_t, Names> names;
    return names;
  }

 private:
  static std::mutex& mutex() {
    static std::mutex mutex;
    return mutex;
  }

  at::CallbackHandle handle_;
};

TEST(Profiler, SeesARangeForEachAction) {
  for (const Generator& generator : generators()) {
    SCOPED_TRACE(generator.name);
    const Schedule schedule = generate(generator.name, {.ranks = 2, .microbatches = 4});
    const Model model = perceptron(schedule.stages());
    Pipeline pipeline(model.pipeline_stages(), schedule, {.loss = squared_error});
    const Ranges ranges;
    if (features_of(schedule).backward) {
      pipeline.step({rows(8, "x")}, {}, rows(8, "y"));
    } else {
      pipeline.eval({rows(8, "x")});
    }
    EXPECT_EQ(ranges_of(pipeline.recorded_schedule()), sorted_lists(Ranges::seen()));
  }
}

TEST(Profiler, OfTheCallersThreadSeesAllRanks) {
  namespace profiler = torch::autograd::profiler;
  using torch::profiler::impl::ActivityType;
  const Schedule schedule = generate("ZBVZeroBubble", {.ranks = 2, .microbatches = 4});
  const Model model = perceptron(schedule.stages());
  Pipeline pipeline(model.pipeline_stages(), schedule, {.loss = squared_error});
  const torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
  profiler::prepareProfiler(config, {ActivityType::CPU});
  profiler::enableProfiler(config, {ActivityType::CPU});
  pipeline.step({rows(8, "x")}, {}, rows(8, "y"));
  const auto result = profiler::disableProfiler();
  // What comes later is not seen, nor does it meet a profiler that has gone.
  pipeline.step({rows(8, "x")}, {}, rows(8, "y"));

  std::map<std::uint64_t, std::vector<std::pair<std::uint64_t, std::string>>> by_time;
  std::size_t operators = 0;
  for (const auto& event : result->events()) {
    if (event.name().starts_with("PP:")) by_time[event.startThreadId()].emplace_back(event.startNs(), event.name());
    if (event.name() == "aten::addmm") ++operators;
  }
  std::map<std::uint64_t, Names> by_thread;
  for (auto& [thread, events] : by_time) {
    std::sort(events.begin(), events.end());
    for (const auto& [start, name] : events) by_thread[thread].push_back(name);
  }
  EXPECT_EQ(ranges_of(pipeline.schedule()), sorted_lists(by_thread));
  EXPECT_EQ(operators, 4U * 4U);
}

}  // namespace
}  // namespace penstock::testing
