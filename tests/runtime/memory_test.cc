// Lifetime of activations, messages and gradients: each is freed by the last action that needs it.
#include <ATen/ATen.h>
#include <c10/core/Storage.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "penstock/runtime/pipeline.h"
#include "penstock/schedule/generators.h"
#include "tests/runtime/models.h"

namespace penstock::internal::testing {
namespace {

// Tensors of a forward y = tanh(2 x W) + b and its backward.
enum class What {
  // x, and y if it is sent to another stage: no operator saves them.
  Input,
  Output,
  // 2 x, which the gradient of W is computed from.
  Factor,
  // The tanh, which its own gradient is computed from.
  Middle,
  // The gradients of y and of 2 x W.
  Gradient,
  FactorGradient,
};

// Refers to a tensor's storage without owning it.
class Watch {
 public:
  void look_at(What what, int stage, int microbatch, const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    seen_.insert_or_assign({what, stage, microbatch}, tensor.storage().getWeakStorageImpl());
  }
  bool seen(What what, int stage, int microbatch) {
    const std::lock_guard lock(mutex_);
    return seen_.contains({what, stage, microbatch});
  }
  bool alive(What what, int stage, int microbatch) {
    const std::lock_guard lock(mutex_);
    const auto found = seen_.find({what, stage, microbatch});
    return found != seen_.end() && !found->second.expired();
  }

 private:
  std::mutex mutex_;
  std::map<std::tuple<What, int, int>, c10::weak_intrusive_ptr<c10::StorageImpl>> seen_;
};

// The microbatch of the forward on this thread.
thread_local int microbatch_now = 0;

Model watched(int stages, Watch& watch) {
  Model model(stages);
  for (int i = 0; i < stages; ++i) {
    const at::Tensor w = weight(numbered("w", i), {kWide, kWide});
    const at::Tensor b = weight(numbered("b", i), {kWide});
    model.stages[static_cast<std::size_t>(i)] = {
        .forward = [=, &watch](const Args& args, const Kwargs&) -> c10::IValue {
          const int microbatch = microbatch_now;
          const auto look_at_gradient = [&](What what, const at::Tensor& tensor) {
            tensor.register_hook([=, &watch](const at::Tensor& gradient) {
              watch.look_at(what, i, microbatch, gradient);
              return gradient;
            });
          };
          const at::Tensor x = tensor(args, 0);
          const at::Tensor factor = x * 2;
          const at::Tensor product = at::matmul(factor, w);
          const at::Tensor middle = at::tanh(product);
          const at::Tensor y = middle + b;
          // The caller's tensors stay alive.
          if (i > 0) watch.look_at(What::Input, i, microbatch, x);
          watch.look_at(What::Factor, i, microbatch, factor);
          watch.look_at(What::Middle, i, microbatch, middle);
          watch.look_at(What::Output, i, microbatch, y);
          if (y.requires_grad()) {
            look_at_gradient(What::Gradient, y);
            look_at_gradient(What::FactorGradient, product);
          }
          return y;
        },
        .parameters = {{"w", w}, {"b", b}}};
  }
  return model;
}

class EveryScheduleWatched : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { PENSTOCK_ON_CPU_ALONE("a device's message lives until it has been copied"); }

  static constexpr int kMicrobatches = 4;
  static constexpr std::int64_t kRows = 8;

  EveryScheduleWatched()
      : schedule_(generate(GetParam(), {.ranks = 2, .microbatches = kMicrobatches})),
        model_(watched(schedule_.stages(), watch_)) {}

  // Calls `after` for each computation, and for each part of an overlapped pair.
  template <class After>
  Pipeline pipeline(const After& after) {
    PipelineOptions options{.loss = squared_error};
    options.functions.overrides[Computation::Forward] = [](const Action& action, ActionContext& context) {
      microbatch_now = action.microbatch;
      context.run(action);
    };
    options.functions.after = [after](int rank, const Action& action) {
      for_each_part(action, [&](const Action& part) {
        if (part.is_compute()) after(rank, part);
      });
    };
    return {model_.build(), schedule_, options};
  }
  void step(Pipeline& pipeline) {
    StepOptions options;
    options.return_outputs = false;
    pipeline.step({rows(kRows, "x")}, {}, rows(kRows, "y"), options);
  }
  bool alive(What what, const Action& action) { return watch_.alive(what, action.stage, action.microbatch); }
  bool seen(What what, const Action& action) { return watch_.seen(what, action.stage, action.microbatch); }
  bool is_last(const Action& action) const { return action.stage == schedule_.stages() - 1; }

  Watch watch_;
  Schedule schedule_;
  Model model_;
};
std::vector<std::string> names() {
  std::vector<std::string> all;
  for (const Generator& generator : generators()) {
    if (generator.name != "ForwardOnly") all.emplace_back(generator.name);
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(Threads, EveryScheduleWatched, ::testing::ValuesIn(names()),
                         [](const auto& one) { return one.param; });

TEST_P(EveryScheduleWatched, FreesAMessageWhenItsForwardHasUsedIt) {
  Pipeline made = pipeline([this](int, const Action& action) {
    if (!is_forward(action) || action.stage == 0) return;
    const Action sender = forward(action.stage - 1, action.microbatch);
    EXPECT_TRUE(seen(What::Output, sender)) << to_string(action);
    EXPECT_FALSE(alive(What::Output, sender)) << to_string(action);
    EXPECT_FALSE(alive(What::Input, action)) << to_string(action);
    // The backward needs these.
    EXPECT_TRUE(alive(What::Factor, action)) << to_string(action);
    EXPECT_TRUE(alive(What::Middle, action)) << to_string(action);
  });
  step(made);
}

TEST_P(EveryScheduleWatched, FreesGradientsAndActivationsWithTheBackwardThatUsedThem) {
  Pipeline made = pipeline([this](int, const Action& action) {
    if (is_forward(action)) return;
    EXPECT_TRUE(seen(What::Factor, action)) << to_string(action);
    // A full backward leaves nothing saved, and neither does a weight backward.
    if (makes_weight_gradient(action)) {
      EXPECT_TRUE(seen(What::Gradient, action)) << to_string(action);
      for (const What what : {What::Factor, What::Middle, What::Output, What::Gradient, What::FactorGradient}) {
        EXPECT_FALSE(alive(what, action)) << to_string(action) << ", " << static_cast<int>(what);
      }
      return;
    }
    // The first stage has no input gradient: its whole backward is for its parameters.
    if (action.stage == 0) return;
    EXPECT_TRUE(alive(What::Factor, action)) << to_string(action);
    EXPECT_TRUE(alive(What::FactorGradient, action)) << to_string(action);
    EXPECT_FALSE(alive(What::Middle, action)) << to_string(action);
    EXPECT_TRUE(seen(What::Gradient, action)) << to_string(action);
    EXPECT_FALSE(alive(What::Gradient, action)) << to_string(action);
    // On the last stage the loss has saved it until now.
    EXPECT_FALSE(alive(What::Output, action)) << to_string(action);
  });
  step(made);
}

TEST_P(EveryScheduleWatched, KeepsTheActivationsThatItsOrderSaysAndNoOthers) {
  std::mutex mutex;
  std::map<int, int> kept;
  Pipeline made = pipeline([&](int, const Action& action) {
    const std::lock_guard lock(mutex);
    int& expected = kept[action.stage];
    if (is_forward(action)) ++expected;
    if (makes_weight_gradient(action)) --expected;
    int found = 0;
    for (int i = 0; i < kMicrobatches; ++i) {
      if (watch_.alive(What::Factor, action.stage, i)) ++found;
    }
    EXPECT_EQ(expected, found) << to_string(action);
  });
  // A second step finds nothing of the first.
  step(made);
  step(made);
  for (const auto& [stage, left] : kept) EXPECT_EQ(left, 0) << stage;
}

TEST_P(EveryScheduleWatched, KeepsNothingInEvaluation) {
  Pipeline made = pipeline([this](int, const Action& action) {
    EXPECT_TRUE(seen(What::Factor, action)) << to_string(action);
    for (const What what : {What::Input, What::Factor, What::Middle}) {
      EXPECT_FALSE(alive(what, action)) << to_string(action) << ", " << static_cast<int>(what);
    }
    EXPECT_EQ(alive(What::Output, action), !is_last(action)) << to_string(action);
  });
  StepOptions options;
  options.return_outputs = false;
  made.eval({rows(kRows, "x")}, {}, rows(kRows, "y"), options);
}

}  // namespace
}  // namespace penstock::internal::testing
