// Observable effects of a step: ranges in PyTorch's profiler, and reductions in flight.
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "penstock/runtime/pipeline.h"
#include "penstock/schedule/generators.h"
#include "tests/runtime/models.h"

namespace penstock::internal::testing {
namespace {

using Names = std::vector<std::string>;

// Returns the ranges that the profiler should record.
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

// Sorts them, as threads run in no fixed order.
std::vector<Names> sorted_lists(const std::map<std::uint64_t, Names>& by_thread) {
  std::vector<Names> lists;
  for (const auto& [thread, names] : by_thread) lists.push_back(names);
  std::sort(lists.begin(), lists.end());
  return lists;
}

// Records the ranges of all threads during its lifetime.
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
    Pipeline pipeline(model.build(), schedule, {.loss = squared_error});
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
  Pipeline pipeline(model.build(), schedule, {.loss = squared_error});
  const torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
  profiler::prepareProfiler(config, {ActivityType::CPU});
  profiler::enableProfiler(config, {ActivityType::CPU});
  pipeline.step({rows(8, "x")}, {}, rows(8, "y"));
  const auto result = profiler::disableProfiler();
  // Later steps are not recorded, and use nothing of the destroyed profiler.
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

// Holds the second of two replicas at a reduction until the first has run a computation of another stage of the same
// rank. A rank that waited for its reduction at once would never get there.
class HeldReduction {
 public:
  HeldReduction(int rank, int stage) : rank_(rank), stage_(stage) {}

  void before(int rank, const Action& action) {
    if (!is_reduction(rank, action)) return;
    std::unique_lock lock(mutex_);
    if (!first_) {
      first_ = std::this_thread::get_id();
      return;
    }
    held_in_time_ = changed_.wait_for(lock, std::chrono::seconds(20), [this] { return computed_; });
  }
  void after(int rank, const Action& action) {
    const std::lock_guard lock(mutex_);
    if (rank != rank_ || first_ != std::this_thread::get_id()) return;
    if (is_reduction(rank, action)) reduced_ = true;
    if (!reduced_ || !action.is_compute()) return;
    computed_ = true;
    changed_.notify_all();
  }
  bool held_in_time() const { return held_in_time_; }

 private:
  bool is_reduction(int rank, const Action& action) const {
    return rank == rank_ && action.computation == Computation::ReduceGrad && action.stage == stage_;
  }

  int rank_;
  int stage_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<std::thread::id> first_;
  bool reduced_ = false;
  bool computed_ = false;
  bool held_in_time_ = false;
};

// A reduction in a rank's list, and the next computation after it.
struct ReductionAndNext {
  int rank;
  std::size_t reduction;
  std::size_t computation;
};
std::vector<ReductionAndNext> reductions_before_computations(const Schedule& schedule) {
  std::vector<ReductionAndNext> found;
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    const auto actions = schedule.actions(rank);
    for (std::size_t i = 0; i < actions.size(); ++i) {
      if (actions[i].computation != Computation::ReduceGrad) continue;
      std::size_t next = i + 1;
      while (next < actions.size() && !actions[next].is_compute()) ++next;
      if (next < actions.size()) found.push_back({rank, i, next});
    }
  }
  return found;
}

TEST(Record, ShowsReductionsUnderWayWhileOtherStagesCompute) {
  PENSTOCK_ON_CPU_ALONE("the record of a device tells when its stream reached an action, not the host");
  constexpr int kReplicas = 2;
  for (const char* name : {"LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"}) {
    const Schedule schedule = generate(name, {.ranks = 2, .microbatches = 4});
    for (const bool sharded : {false, true}) {
      SCOPED_TRACE(std::string(name) + (sharded ? ", sharded" : ", replicated"));
      std::unique_ptr<HeldReduction> held;
      PipelineOptions options{.loss = squared_error, .sharded = sharded};
      options.functions.before = [&](int rank, const Action& action) { held->before(rank, action); };
      options.functions.after = [&](int rank, const Action& action) { held->after(rank, action); };
      const Model models[kReplicas] = {perceptron(schedule.stages()), perceptron(schedule.stages())};
      std::vector<StagedModel> replicas;
      for (const Model& model : models) replicas.push_back(model.build());
      Pipeline pipeline(std::move(replicas), schedule, options);

      const auto cases = reductions_before_computations(pipeline.schedule());
      ASSERT_FALSE(cases.empty());
      for (const auto& [rank, reduction, computation] : cases) {
        held = std::make_unique<HeldReduction>(rank, pipeline.schedule().actions(rank)[reduction].stage);
        pipeline.step({rows(16, "x")}, {}, rows(16, "y"));
        ASSERT_TRUE(held->held_in_time()) << to_string(pipeline.schedule().actions(rank)[reduction]);
        // The first replica has started its reduction, and continued to compute, before the second one arrived.
        const std::vector<ActionRecord>* first = &pipeline.record(0)[static_cast<std::size_t>(rank)];
        const std::vector<ActionRecord>* second = &pipeline.record(1)[static_cast<std::size_t>(rank)];
        if ((*first)[reduction].end > (*second)[reduction].end) std::swap(first, second);
        EXPECT_LE((*first)[reduction].end, (*first)[computation].start);
        EXPECT_LT((*first)[computation].start, (*second)[reduction].end);
      }
    }
  }
}

}  // namespace
}  // namespace penstock::internal::testing
