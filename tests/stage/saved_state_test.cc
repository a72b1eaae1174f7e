// Gradients that a rollback restores, and what saving them costs.
#include "penstock/stage/saved_state.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "tests/stage/stages.h"

namespace penstock::internal::testing {
namespace {

constexpr std::int64_t kRows = 5;
constexpr std::int64_t kColumns = 3;

// A parameter to whose gradient a first backward has added.
at::Tensor parameter_with_gradient() {
  at::Tensor weight = numbers({kColumns, kColumns}, 1).requires_grad_();
  numbers({kRows, kColumns}, 2).mm(weight).sin().sum().backward();
  return weight;
}

void run_backward(const at::Tensor& weight, std::int64_t seed) {
  numbers({kRows, kColumns}, seed).mm(weight).sin().sum().backward();
}

// Runs two backwards, and returns the gradient that they leave without a SavedState.
at::Tensor plain_sum() {
  const at::Tensor weight = parameter_with_gradient();
  run_backward(weight, 3);
  run_backward(weight, 4);
  return weight.grad();
}

TEST(SavedState, AddsInTheOrderOfPlainAutograd) {
  const at::Tensor weight = parameter_with_gradient();
  SavedState saved;
  saved.add_accumulated_gradient(weight);
  run_backward(weight, 3);
  run_backward(weight, 4);
  saved.clear();
  EXPECT_TRUE(same_bits(plain_sum(), weight.grad()));
}

// The gradient from before stays in its memory, and the sum is formed in that of the incoming gradient.
TEST(SavedState, KeepsAGradientWithoutACopy) {
  const at::Tensor weight = parameter_with_gradient();
  const void* const memory = weight.grad().data_ptr();
  const at::Tensor before = weight.grad().clone();
  const void* incoming = nullptr;
  weight.register_hook([&incoming](const at::Tensor& gradient) {
    if (incoming == nullptr) incoming = gradient.data_ptr();
  });
  SavedState saved;
  saved.add_accumulated_gradient(weight);
  run_backward(weight, 3);
  ASSERT_NE(incoming, nullptr);
  EXPECT_NE(incoming, memory);
  EXPECT_EQ(weight.grad().data_ptr(), incoming);
  run_backward(weight, 4);
  EXPECT_EQ(weight.grad().data_ptr(), incoming);
  saved.restore();
  EXPECT_EQ(weight.grad().data_ptr(), memory);
  EXPECT_TRUE(same_bits(before, weight.grad()));
}

// The gradient of a linear layer's weight is a view: it is computed transposed.
TEST(SavedState, AddsInTheMemoryOfAViewThatNobodyElseHas) {
  const at::Tensor weight = numbers({kColumns, kColumns}, 1).requires_grad_();
  const auto backward = [&] { at::linear(numbers({kRows, kColumns}, 2), weight).sin().sum().backward(); };
  backward();
  const void* incoming = nullptr;
  bool is_view = false;
  weight.register_hook([&](const at::Tensor& gradient) {
    incoming = gradient.data_ptr();
    is_view = gradient.is_view();
  });
  SavedState saved;
  saved.add_accumulated_gradient(weight);
  backward();
  EXPECT_TRUE(is_view);
  EXPECT_EQ(weight.grad().data_ptr(), incoming);
}

// One tensor as the gradient of two parameters: what the first adds is not taken for what was there before.
TEST(SavedState, RestoresAGradientThatTwoParametersHave) {
  const at::Tensor first = parameter_with_gradient();
  const at::Tensor second = numbers({kColumns, kColumns}, 5).requires_grad_();
  second.mutable_grad() = first.grad();
  const at::Tensor before = first.grad().clone();
  SavedState saved;
  saved.add_accumulated_gradient(first);
  saved.add_accumulated_gradient(second);
  run_backward(first, 3);
  run_backward(second, 4);
  saved.restore();
  EXPECT_TRUE(same_bits(before, first.grad()));
  EXPECT_TRUE(first.grad().is_same(second.grad()));
}

TEST(SavedState, RestoresTheSameTensorForWhoeverRefersToIt) {
  const at::Tensor weight = parameter_with_gradient();
  const at::Tensor gradient = weight.grad();
  const at::Tensor view = gradient.view(-1);
  const at::Tensor before = gradient.clone();
  SavedState saved;
  saved.add_accumulated_gradient(weight);
  run_backward(weight, 3);
  // Seen at once, as without a SavedState.
  EXPECT_TRUE(weight.grad().is_same(gradient));
  EXPECT_FALSE(at::equal(view, before.view(-1)));
  run_backward(weight, 4);
  EXPECT_TRUE(same_bits(plain_sum(), gradient));
  saved.restore();
  EXPECT_TRUE(weight.grad().is_same(gradient));
  EXPECT_TRUE(same_bits(before.view(-1), view));
}

// The owner of the memory sees the sums, although nothing but .grad refers to the tensor.
TEST(SavedState, AddsIntoMemoryThatTheCallerOwns) {
  PENSTOCK_ON_CPU_ALONE("the memory is that of the host");
  std::vector<float> memory(kColumns * kColumns, 1.0F);
  const at::Tensor weight = parameter_with_gradient();
  const at::Tensor first = weight.grad().clone();
  weight.mutable_grad() = at::from_blob(memory.data(), {kColumns, kColumns});
  weight.mutable_grad().copy_(first);
  SavedState saved;
  saved.add_accumulated_gradient(weight);
  run_backward(weight, 3);
  run_backward(weight, 4);
  EXPECT_TRUE(same_bits(plain_sum(), at::from_blob(memory.data(), {kColumns, kColumns})));
  saved.restore();
  EXPECT_TRUE(same_bits(first, at::from_blob(memory.data(), {kColumns, kColumns})));
}

TEST(SavedState, RestoresThatThereWasNoGradient) {
  const at::Tensor weight = numbers({kColumns, kColumns}, 1).requires_grad_();
  SavedState saved;
  saved.add_accumulated_gradient(weight);
  run_backward(weight, 3);
  EXPECT_TRUE(weight.grad().defined());
  saved.restore();
  EXPECT_FALSE(weight.grad().defined());
}

// The gradient of a sum is an expanded number, which has no memory for the new gradient.
TEST(SavedState, TakesAnIncomingGradientThatIsExpanded) {
  const at::Tensor weight = numbers({4}, 1).requires_grad_();
  weight.sum().backward();
  SavedState saved;
  saved.add_accumulated_gradient(weight);
  weight.sum().backward();
  weight.sum().backward();
  EXPECT_TRUE(at::equal(weight.grad(), at::full({4}, 3.0, test_device(0))));
  EXPECT_TRUE(weight.grad().is_contiguous());
  saved.restore();
  EXPECT_TRUE(at::equal(weight.grad(), at::ones({4}, test_device(0))));
}

TEST(SavedState, LeavesAnIncomingGradientThatSomebodyElseHas) {
  const at::Tensor weight = parameter_with_gradient();
  std::vector<at::Tensor> seen;
  weight.register_hook([&seen](const at::Tensor& gradient) { seen.push_back(gradient); });
  std::vector<at::Tensor> expected;
  const at::Tensor plain = parameter_with_gradient();
  plain.register_hook([&expected](const at::Tensor& gradient) { expected.push_back(gradient.clone()); });
  SavedState saved;
  saved.add_accumulated_gradient(weight);
  run_backward(weight, 3);
  run_backward(plain, 3);
  ASSERT_EQ(seen.size(), 1U);
  EXPECT_TRUE(same_bits(expected[0], seen[0]));
  EXPECT_TRUE(same_bits(plain.grad(), weight.grad()));
}

// Notes .grad as it is after each addition.
class GradientNote : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit GradientNote(std::vector<at::Tensor>& seen) : seen_(seen) {}
  void operator()(const at::Tensor& tensor) override { seen_.push_back(tensor.grad().clone()); }

 private:
  std::vector<at::Tensor>& seen_;
};

TEST(SavedState, ShowsHooksAfterAnAdditionWhatTheyWouldSee) {
  std::vector<std::vector<at::Tensor>> seen(2);
  for (const bool is_saved : {false, true}) {
    const at::Tensor weight = parameter_with_gradient();
    const at::Tensor before = weight.grad().clone();
    torch::autograd::impl::set_post_acc_grad_hooks(weight, std::make_unique<GradientNote>(seen[is_saved ? 1 : 0]));
    SavedState saved;
    if (is_saved) saved.add_accumulated_gradient(weight);
    run_backward(weight, 3);
    run_backward(weight, 4);
    saved.restore();
    EXPECT_EQ(same_bits(before, weight.grad()), is_saved);
  }
  ASSERT_EQ(seen[0].size(), 2U);
  ASSERT_EQ(seen[1].size(), 2U);
  for (std::size_t i = 0; i < 2; ++i) EXPECT_TRUE(same_bits(seen[0][i], seen[1][i])) << i;
}

TEST(SavedState, LeavesNoHookBehind) {
  const at::Tensor weight = parameter_with_gradient();
  const auto accumulator = torch::autograd::impl::grad_accumulator(weight);
  for (int i = 0; i < 3; ++i) {
    SavedState saved;
    saved.add_accumulated_gradient(weight);
    EXPECT_EQ(accumulator->pre_hooks().size(), 1U);
    SavedState moved = std::move(saved);
    EXPECT_EQ(accumulator->pre_hooks().size(), 1U);
    if (i == 0) moved.clear();
    if (i == 1) moved.restore();
  }
  EXPECT_TRUE(accumulator->pre_hooks().empty());
}

TEST(SavedState, RestoresAParameterThatSeveralThreadsAddTo) {
  for (int i = 0; i < 200; ++i) {
    const at::Tensor weight = at::ones({64}).requires_grad_();
    weight.mutable_grad() = at::full({64}, 7.0);
    SavedState saved;
    // Once for each stage.
    for (int stage = 0; stage < 2; ++stage) saved.add_accumulated_gradient(weight);
    std::vector<std::thread> threads;
    std::atomic<int> ready = 0;
    for (int thread = 0; thread < 2; ++thread) {
      threads.emplace_back([&] {
        const at::Tensor loss = (weight * at::full({64}, 2.0)).sum();
        ++ready;
        while (ready < 2) std::this_thread::yield();
        loss.backward();
      });
    }
    for (std::thread& thread : threads) thread.join();
    ASSERT_TRUE(at::equal(weight.grad(), at::full({64}, 11.0))) << weight.grad();
    saved.restore();
    ASSERT_TRUE(at::equal(weight.grad(), at::full({64}, 7.0))) << weight.grad();
  }
}

}  // namespace
}  // namespace penstock::internal::testing
