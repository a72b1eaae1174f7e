// Failures of process ranks, here on threads of one process that communicate through Gloo: every rank throws the same
// error in time, and can construct a new pipeline. And cancellation of steps.
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "penstock/runtime/pipeline.h"
#include "penstock/schedule/generators.h"
#include "penstock/transport/c10d.h"
#include "tests/runtime/models.h"
#include "tests/transport/ranks.h"

namespace penstock::internal::testing {
namespace {

constexpr int kRanks = 4;

// A process rank with its own model, of which the third stage can be changed.
struct Member {
  Member(const c10::intrusive_ptr<c10d::Store>& given_store, int given_rank)
      : store(given_store), rank(given_rank), model(perceptron(kRanks)) {
    model.stages[2].forward = [this, before = model.stages[2].forward](const Args& args,
                                                                       const Kwargs& kwargs) -> c10::IValue {
      const c10::IValue output = before(args, kwargs);
      return replaced ? replaced(output) : output;
    };
  }

  void connect(std::chrono::milliseconds timeout) {
    // Disconnects the previous pipeline first.
    pipeline.reset();
    PipelineOptions options{.transport = c10d_transport(store, rank, kRanks),
                            .loss = [this](const c10::IValue& output, const c10::IValue& target, const Kwargs& kwargs) {
                              if (loss_fails) throw std::runtime_error("no loss");
                              return squared_error(output, target, kwargs);
                            }};
    options.timeout = timeout;
    const auto own = schedule.placement().stages_of(rank);
    pipeline = std::make_unique<Pipeline>(model.build({own.begin(), own.end()}), schedule, options);
  }
  void step() const { pipeline->step({rows(8, "x")}, {}, rows(8, "y")); }

  c10::intrusive_ptr<c10d::Store> store;
  int rank;
  Model model;
  Schedule schedule = generate("1F1B", {.ranks = kRanks, .microbatches = 4});
  std::function<c10::IValue(const c10::IValue&)> replaced;
  bool loss_fails = false;
  double seconds = 0;
  std::unique_ptr<Pipeline> pipeline;
};

// Calls a function once, when this thread next runs an operator.
class AtNextOperator {
 public:
  explicit AtNextOperator(const std::function<void()>& act) : handle_(add(act)) {}
  ~AtNextOperator() { at::removeCallback(handle_); }
  AtNextOperator(const AtNextOperator&) = delete;
  AtNextOperator& operator=(const AtNextOperator&) = delete;

 private:
  static at::CallbackHandle add(const std::function<void()>& act) {
    static std::function<void()> once;
    once = act;
    return at::addThreadLocalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction&) -> std::unique_ptr<at::ObserverContext> {
          if (const auto now = std::exchange(once, nullptr)) now();
          return nullptr;
        }).scopes({at::RecordScope::FUNCTION}));
  }

  at::CallbackHandle handle_;
};

class ProcessFailure : public ::testing::Test {
 protected:
  ProcessFailure() {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    for (int rank = 0; rank < kRanks; ++rank) members_.push_back(std::make_unique<Member>(store, rank));
  }
  void connect(std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
    on_threads(kRanks, [&](int rank) { members_[static_cast<std::size_t>(rank)]->connect(timeout); });
  }
  // Returns the errors of the first ranks, and sets the seconds that each took.
  std::vector<std::string> errors_of(const std::function<void(Member&)>& act, int ranks = kRanks) {
    std::vector<std::string> errors(static_cast<std::size_t>(ranks));
    on_threads(ranks, [&](int rank) {
      const auto at = static_cast<std::size_t>(rank);
      const auto began = Clock::now();
      try {
        act(*members_[at]);
      } catch (const PipelineError& error) {
        errors[at] = error.what();
      }
      members_[at]->seconds = std::chrono::duration<double>(Clock::now() - began).count();
    });
    return errors;
  }
  std::vector<std::string> step() {
    return errors_of([](Member& member) { member.step(); });
  }
  void expect_on_all(const std::vector<std::string>& errors, const std::string& beginning) {
    for (const std::string& error : errors) {
      EXPECT_EQ(error.substr(0, beginning.size()), beginning) << error;
      EXPECT_NE(error.find("<-- here"), std::string::npos) << error;
    }
  }
  Member& failing() { return *members_[2]; }

  std::vector<std::unique_ptr<Member>> members_;
};

TEST_F(ProcessFailure, InAForwardGivesTheSameErrorOnAllRanks) {
  connect();
  failing().replaced = [](const c10::IValue&) -> c10::IValue { throw std::runtime_error("hot bearings"); };
  const std::vector<std::string> errors = step();
  expect_on_all(errors, "rank 2, stage 2, 2F0 (microbatch 0): hot bearings\n  rank 0: was in ");
  const auto without_times = [](const std::string& text) { return text.substr(0, text.find(" for ")); };
  for (const std::string& error : errors) EXPECT_EQ(without_times(error), without_times(errors.front()));
}

TEST_F(ProcessFailure, LeavesNothingToTheNextPipeline) {
  connect();
  EXPECT_EQ(step(), std::vector<std::string>(kRanks));
  std::vector<at::Tensor> gradients;
  for (const auto& member : members_) {
    const auto at = static_cast<std::size_t>(member->rank);
    gradients.push_back(member->model.stages[at].parameters[0].second.grad().clone());
  }
  failing().replaced = [](const c10::IValue&) -> c10::IValue { throw std::runtime_error("hot bearings"); };
  step();
  // Later steps fail at once.
  for (const std::string& error : step()) {
    EXPECT_EQ(error,
              "this pipeline has failed in an earlier step.\n"
              "  Hint: with process ranks, construct a new transport and a new pipeline in each process to continue.");
  }
  failing().replaced = nullptr;
  connect();
  for (const auto& member : members_) {
    const auto at = static_cast<std::size_t>(member->rank);
    const at::Tensor& parameter = member->model.stages[at].parameters[0].second;
    EXPECT_TRUE(same_tensor(gradients[at], parameter.grad())) << at;
    parameter.mutable_grad().reset();
  }
  EXPECT_EQ(step(), std::vector<std::string>(kRanks));
  for (const auto& member : members_) {
    const auto at = static_cast<std::size_t>(member->rank);
    EXPECT_TRUE(same_tensor(gradients[at], member->model.stages[at].parameters[0].second.grad())) << at;
  }
}

TEST_F(ProcessFailure, OfAWrongShapeNamesTheStageThatMadeIt) {
  connect();
  failing().replaced = [](const c10::IValue& output) -> c10::IValue { return output.toTensor().narrow(1, 0, 3); };
  const std::vector<std::string> errors = step();
  // The next stage cannot multiply it.
  expect_on_all(errors, "rank 3, stage 3, 3F0 (microbatch 0): mat1 and mat2 shapes cannot be multiplied (2x3 and 8x8)");
}

TEST_F(ProcessFailure, OfAShapeThatDiffersFromTheCachedOneIsReportedForTheSender) {
  connect();
  EXPECT_EQ(step(), std::vector<std::string>(kRanks));
  failing().replaced = [](const c10::IValue& output) -> c10::IValue { return output.toTensor().narrow(1, 0, 3); };
  expect_on_all(step(), "rank 2, stage 2, 2SEND_F0 (microbatch 0): tensor 0 of message 0 of channel 4 to rank 3 is ");
}

TEST_F(ProcessFailure, OfARankThatSleepsPastTheDeadlineEndsTheOthersInTime) {
  // A step takes milliseconds, or a second on a machine that is busy.
  connect(std::chrono::seconds(3));
  EXPECT_EQ(step(), std::vector<std::string>(kRanks));
  std::atomic<bool> slept = false;
  failing().replaced = [&](const c10::IValue& output) -> c10::IValue {
    if (!slept.exchange(true)) std::this_thread::sleep_for(std::chrono::seconds(7));
    return output;
  };
  const std::vector<std::string> errors = step();
  for (const std::string& error : errors) {
    EXPECT_NE(error.find(" from rank 2 within the deadline of 3.0 s."), std::string::npos) << error;
    EXPECT_NE(error.find("\n  rank 2: was in 2F0 for "), std::string::npos) << error;
  }
}

TEST_F(ProcessFailure, OfABatchThatCannotBeSplitEndsTheStepOfTheOthersAtOnce) {
  connect();
  const std::vector<std::string> errors = errors_of([](Member& member) {
    const at::Tensor x = rows(member.rank == 0 ? 2 : 8, "x");
    member.pipeline->step({x}, {}, x);
  });
  const std::string what = "the arguments can be split into 2 only, and there are 4 microbatches.";
  EXPECT_EQ(errors[0].find(what), 0U) << errors[0];
  for (std::size_t rank = 1; rank < kRanks; ++rank) {
    EXPECT_NE(errors[rank].find("process 0: " + what), std::string::npos) << errors[rank];
  }
}

TEST_F(ProcessFailure, OfTheLastRankReachesThoseThatWaitForItsResults) {
  connect();
  members_[3]->loss_fails = true;
  const std::vector<std::string> errors = errors_of([](Member& member) {
    StepOptions everywhere;
    everywhere.results_everywhere = true;
    member.pipeline->eval({rows(8, "x")}, {}, rows(8, "y"), everywhere);
  });
  expect_on_all(errors, "rank 3, stage 3, 3F0 (microbatch 0): no loss\n");
}

TEST_F(ProcessFailure, OfNothingButAFrozenStageOrAnotherLayoutIsNone) {
  connect();
  EXPECT_EQ(step(), std::vector<std::string>(kRanks));
  for (const auto& member : members_) {
    for (const auto& [name, parameter] : member->model.stages[0].parameters) parameter.set_requires_grad(false);
  }
  EXPECT_EQ(step(), std::vector<std::string>(kRanks));
  on_threads(kRanks, [&](int rank) {
    const at::Tensor x = rows(8, "x").t().contiguous().t();
    members_[static_cast<std::size_t>(rank)]->pipeline->step({x}, {}, x);
  });
}

TEST_F(ProcessFailure, OfAPipelineThatEndsEarlyIsNoticed) {
  connect();
  members_[3]->pipeline.reset();
  const std::vector<std::string> errors = errors_of([](Member& member) { member.step(); }, 3);
  for (std::size_t rank = 0; rank < 3; ++rank) {
    EXPECT_NE(errors[rank].find(": rank 3 has ended\n"), std::string::npos) << errors[rank];
    EXPECT_NE(errors[rank].find("\n  rank 3: did not answer"), std::string::npos) << errors[rank];
  }
}

// Returns the errors that constructing the pipeline of each rank throws.
std::vector<std::string> errors_of_making(const std::function<Pipeline(Transport&, std::shared_ptr<Transport>)>& make) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> errors(2);
  on_threads(2, [&](int rank) {
    std::shared_ptr<Transport> transport = c10d_transport(store, rank, 2);
    try {
      make(*transport, transport);
    } catch (const std::exception& error) {
      errors[static_cast<std::size_t>(rank)] = error.what();
    }
  });
  return errors;
}

TEST(ProcessPipelines, RefuseStagesOfAnotherRank) {
  const Schedule schedule = generate("1F1B", {.ranks = 2, .microbatches = 2});
  const Model model = perceptron(2);
  const auto errors = errors_of_making([&](Transport&, std::shared_ptr<Transport> transport) {
    return Pipeline(model.build({0}), schedule, {.transport = std::move(transport)});
  });
  EXPECT_EQ(errors[0], "process 1: this process was given stages 0, and the schedule places stages 1 on it.");
  EXPECT_EQ(errors[1], "this process was given stages 0, and the schedule places stages 1 on it.");
}

TEST(ProcessPipelines, RefuseToDisagree) {
  const Model model = perceptron(2);
  const auto errors = errors_of_making([&](Transport& own, std::shared_ptr<Transport> transport) {
    const Schedule schedule = generate(own.rank() == 0 ? "1F1B" : "GPipe", {.ranks = 2, .microbatches = 4});
    return Pipeline(model.build({own.rank()}), schedule, {.transport = std::move(transport)});
  });
  for (const std::string& error : errors) {
    EXPECT_EQ(error,
              "process 1 has another pipeline than process 0: the schedule, the wiring, the shared parameters, whether "
              "parameters are sharded and whether there is a loss_weight should be the same in all processes.\n"
              "  Hint: pass the same wiring and shared parameters to StagedModel in all processes.");
  }
}

TEST(ProcessPipelines, RefuseToShareAMissingParameter) {
  const Schedule schedule = generate("1F1B", {.ranks = 2, .microbatches = 4});
  Model model = perceptron(2);
  model.copies = {{{0, "gone"}, {1, "w"}}};
  const auto errors = errors_of_making([&](Transport& own, std::shared_ptr<Transport> transport) {
    PipelineOptions options{.transport = std::move(transport)};
    options.timeout = std::chrono::seconds(5);
    return Pipeline(model.build({own.rank()}), schedule, options);
  });
  EXPECT_EQ(errors[0], "stage 0 has no parameter 'gone' to share.");
  EXPECT_EQ(errors[1].find("process 0: stage 0 has no parameter 'gone' to share."), 0U) << errors[1];
}

TEST(ProcessPipelines, RefuseSeveralReplicasInOneProcess) {
  const Schedule schedule = generate("1F1B", {.ranks = 2, .microbatches = 4});
  const Model model = perceptron(2);
  const auto errors = errors_of_making([&](Transport& own, std::shared_ptr<Transport> transport) {
    std::vector<StagedModel> two;
    for (int i = 0; i < 2; ++i) two.push_back(model.build({own.rank()}));
    return Pipeline(std::move(two), schedule, {.transport = std::move(transport)});
  });
  EXPECT_EQ(errors[0], "there are stages of 2 replicas in this process; a process rank has those of one replica.");
}

TEST(ProcessPipelines, RefuseANumberOfProcessesThatIsNoMultipleOfTheRanks) {
  const Schedule schedule = generate("1F1B", {.ranks = 4, .microbatches = 4});
  const Model model = perceptron(4);
  const auto errors = errors_of_making([&](Transport& own, std::shared_ptr<Transport> transport) {
    return Pipeline(model.build({own.rank()}), schedule, {.transport = std::move(transport)});
  });
  for (const std::string& error : errors) {
    EXPECT_EQ(error,
              "there are 2 processes, and the schedule is for 4 ranks: the first number should be a multiple of the "
              "second.");
  }
}

// A model of two stages. Forwards of the second block until release().
class BlockedModel {
 public:
  BlockedModel() : model_(perceptron(2)) {
    model_.stages[1].forward = [this, before = model_.stages[1].forward](const Args& args,
                                                                         const Kwargs& kwargs) -> c10::IValue {
      if (blocks_.exchange(false)) released_.wait();
      return before(args, kwargs);
    };
  }
  BlockedModel(const BlockedModel&) = delete;
  BlockedModel& operator=(const BlockedModel&) = delete;

  Model& model() { return model_; }
  Pipeline pipeline() const {
    return {model_.build(), generate("1F1B", {.ranks = 2, .microbatches = 4}), {.loss = squared_error}};
  }
  bool is_in_forward() const { return !blocks_; }
  void block_again() {
    release_ = {};
    released_ = release_.get_future().share();
    blocks_ = true;
  }
  void release() { release_.set_value(); }

  // Runs a step, cancels it once an action does not return, and returns the error that it throws.
  std::string cancelled_step(Pipeline& pipeline) const {
    std::thread impatient([&] {
      while (blocks_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      pipeline.cancel();
    });
    std::string what = "nothing was thrown";
    try {
      pipeline.step({rows(8, "x")}, {}, rows(8, "y"));
    } catch (const PipelineError& error) {
      what = error.what();
    }
    impatient.join();
    return what;
  }

 private:
  Model model_;
  std::promise<void> release_;
  std::shared_future<void> released_ = release_.get_future().share();
  std::atomic<bool> blocks_ = true;
};

TEST(Cancel, EndsAStepWhoseActionDoesNotReturn) {
  BlockedModel blocked;
  Pipeline pipeline = blocked.pipeline();
  const std::string what = blocked.cancelled_step(pipeline);
  const std::string beginning =
      "rank 1, stage 1, 1F0 (microbatch 0): the caller has cancelled the step\n  rank 0: was in ";
  EXPECT_EQ(what.substr(0, beginning.size()), beginning) << what;
  blocked.release();
  // The next step waits for the action, and sees nothing of the cancelled step.
  pipeline.step({rows(8, "x")}, {}, rows(8, "y"));
  const Model again = perceptron(2);
  Pipeline other(again.build(), generate("1F1B", {.ranks = 2, .microbatches = 4}), {.loss = squared_error});
  other.step({rows(8, "x")}, {}, rows(8, "y"));
  expect_equal(gradients_of(again), gradients_of(blocked.model()));
  // No step is in flight.
  pipeline.cancel();
  pipeline.step({rows(8, "x")}, {}, rows(8, "y"));
}

// The caller's first operator in a step splits the batch, before any rank has started.
TEST(Cancel, EndsAStepThatHasNotBegunItsActions) {
  Model model = perceptron(2);
  std::atomic<int> forwards = 0;
  for (StageModule& stage : model.stages) {
    stage.forward = [&, before = stage.forward](const Args& args, const Kwargs& kwargs) {
      ++forwards;
      return before(args, kwargs);
    };
  }
  Pipeline pipeline(model.build(), generate("1F1B", {.ranks = 2, .microbatches = 4}), {.loss = squared_error});
  const at::Tensor x = rows(8, "x");
  const at::Tensor y = rows(8, "y");
  std::string what = "nothing was thrown";
  try {
    const AtNextOperator at_split([&] { pipeline.cancel(); });
    pipeline.step({x}, {}, y);
  } catch (const PipelineError& error) {
    what = error.what();
  }
  EXPECT_EQ(what, "the caller has cancelled the step.");
  EXPECT_EQ(forwards, 0);
  EXPECT_EQ(pipeline.step({x}, {}, y).losses.size(), 4U);
}

// An action of a cancelled step that does not return holds up the next step, which can be cancelled too.
TEST(Cancel, EndsAStepThatWaitsForTheOneBefore) {
  BlockedModel blocked;
  Pipeline pipeline = blocked.pipeline();
  for (int i = 0; i < 2; ++i) {
    std::atomic<bool> done = false;
    std::thread impatient([&] {
      while (!done) {
        if (blocked.is_in_forward()) pipeline.cancel();
        std::this_thread::yield();
      }
    });
    EXPECT_THROW(pipeline.step({rows(8, "x")}, {}, rows(8, "y")), PipelineError);
    done = true;
    impatient.join();
  }
  blocked.release();
  EXPECT_EQ(pipeline.step({rows(8, "x")}, {}, rows(8, "y")).losses.size(), 4U);
}

// The step is rolled back when its actions have returned, even if no other step follows.
TEST(Cancel, IsRolledBackByTheDestructor) {
  BlockedModel blocked;
  const at::Tensor counter = at::zeros({1});
  StageModule& first = blocked.model().stages[0];
  first.buffers.emplace_back("counter", counter);
  first.forward = [counter, before = first.forward](const Args& args, const Kwargs& kwargs) {
    {
      const c10::NoGradGuard no_grad;
      counter.add_(1);
    }
    return before(args, kwargs);
  };
  {
    Pipeline pipeline = blocked.pipeline();
    blocked.release();
    pipeline.step({rows(8, "x")}, {}, rows(8, "y"));
    EXPECT_EQ(counter.item<float>(), 4);
    blocked.block_again();
    blocked.cancelled_step(pipeline);
    EXPECT_GT(counter.item<float>(), 4);
    blocked.release();
  }
  EXPECT_EQ(counter.item<float>(), 4);
}

TEST(Timeout, MayBeOfAnyLength) {
  const Model model = perceptron(2);
  PipelineOptions options{.loss = squared_error};
  options.timeout = std::chrono::milliseconds::max();
  Pipeline pipeline(model.build(), generate("1F1B", {.ranks = 2, .microbatches = 4}), options);
  EXPECT_EQ(pipeline.step({rows(8, "x")}, {}, rows(8, "y")).losses.size(), 4U);
}

TEST_F(ProcessFailure, DoesNotFollowFromTheLongestTimeout) {
  connect(std::chrono::milliseconds::max());
  EXPECT_EQ(step(), std::vector<std::string>(kRanks));
}

TEST_F(ProcessFailure, OfATensorThatCannotBeSentNamesTheStageAndItsOutput) {
  PENSTOCK_ON_CPU_ALONE("the simulated device has no sparse tensors");
  connect();
  failing().replaced = [](const c10::IValue& output) -> c10::IValue { return output.toTensor().to_sparse(); };
  expect_on_all(step(),
                "rank 2, stage 2, 2SEND_F0 (microbatch 0): output 0 of stage 2 is a sparse float32 tensor of shape [2, "
                "8]; only dense tensors in the memory of the CPU or of an accelerator can be sent between processes.");
}

TEST(Cancel, AtAnyMomentEndsOneStepOrNone) {
  const Model model = perceptron(2);
  Pipeline pipeline(model.build(), generate("1F1B", {.ranks = 2, .microbatches = 4}), {.loss = squared_error});
  std::atomic<bool> done = false;
  std::thread impatient([&] {
    while (!done) {
      pipeline.cancel();
      std::this_thread::yield();
    }
  });
  const at::Tensor x = rows(8, "x");
  int cancelled = 0;
  for (int i = 0; i < 300; ++i) {
    try {
      EXPECT_EQ(pipeline.step({x}, {}, x).losses.size(), 4U);
    } catch (const PipelineError& error) {
      // Before the ranks have started there is no action to report.
      const std::string what = error.what();
      EXPECT_TRUE(what == "the caller has cancelled the step." ||
                  what.find(": the caller has cancelled the step\n") != std::string::npos)
          << what;
      ++cancelled;
    }
  }
  done = true;
  impatient.join();
  EXPECT_GT(cancelled, 0);
  // A cancelled step has ended when the next one begins.
  pipeline.eval({x});
  zero_grad(model);
  pipeline.step({x}, {}, x);
  const Model again = perceptron(2);
  Pipeline other(again.build(), generate("1F1B", {.ranks = 2, .microbatches = 4}), {.loss = squared_error});
  other.step({x}, {}, x);
  expect_equal(gradients_of(again), gradients_of(model));
}

}  // namespace
}  // namespace penstock::internal::testing
