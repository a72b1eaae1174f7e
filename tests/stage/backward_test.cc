// Guarantees of a stage's backward besides its gradients: what runs in which half and how often, what stays saved, and
// what is refused.
#include "penstock/stage/backward.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tests/stage/functions.h"
#include "tests/stage/stages.h"

namespace penstock::internal::testing {
namespace {

at::Tensor parameter(at::IntArrayRef shape, std::int64_t seed = 1) {
  return numbers(shape, seed).requires_grad_();
}

// Counts calls of an operator. One that returns several gradients counts once for each.
int count(const Operators& operators, const std::string& name) {
  int result = 0;
  for (const auto& [found, times] : operators) {
    if (found == "aten::" + name || found.starts_with("aten::" + name + "[")) result += times;
  }
  return result;
}

TEST(StageInputs, AreAliasesThatBeginAHistory) {
  const at::Tensor x = numbers({2, 3});
  const at::Tensor leaf = parameter({2, 3});
  const StageInputs inputs({x, leaf * 2, leaf, at::arange(3), at::Tensor(), x}, {true, true, true, true, true, false});
  const Tensors& tensors = inputs.tensors();
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(tensors[i].requires_grad()) << i;
    EXPECT_FALSE(tensors[i].is_leaf()) << i;
    EXPECT_FALSE(tensors[i].is_view()) << i;
    EXPECT_EQ(tensors[i].grad_fn().get(), tensors[0].grad_fn().get()) << i;
    EXPECT_EQ(tensors[i].grad_fn()->num_outputs(), 0U) << i;
  }
  EXPECT_EQ(tensors[0].data_ptr(), x.data_ptr());
  EXPECT_FALSE(tensors[3].requires_grad());
  EXPECT_FALSE(tensors[4].defined());
  EXPECT_FALSE(tensors[5].requires_grad());
  EXPECT_FALSE(x.requires_grad());
  const auto version = x._version();
  tensors[0].add_(1);
  tensors[5].add_(1);
  EXPECT_EQ(x._version(), version);
  EXPECT_TRUE(same(numbers({2, 3}) + 2, x));
}

TEST(StageInputs, RefusesWhatCannotBeGiven) {
  expect_error<std::invalid_argument>(
      [] { StageInputs({numbers({2})}, {}); },
      "StageInputs: found 0 values of needs_grad, expected 1, one for each tensor received.");
  at::Tensor inference;
  {
    const c10::InferenceMode guard;
    inference = at::ones({2});
  }
  expect_error<std::invalid_argument>(
      [&] { StageInputs({numbers({2}), inference}, {true, true}); },
      "input 1 needs a gradient, but is an inference tensor, for which autograd records nothing.\n"
      "  Hint: create it outside of torch::InferenceMode, or clone it there.");
}

StageBackward small_backward(const at::Tensor& weight) {
  StageInputs inputs({numbers({2, 3})}, {true});
  const at::Tensor output = inputs.tensors()[0].mm(weight).sin();
  return {std::move(inputs), {output, weight * 2, weight.detach()}};
}

TEST(StageBackward, RefusesAnyOtherOrderOfItsParts) {
  const at::Tensor weight = parameter({3, 3});
  const Tensors gradients = {at::ones({2, 3}), {}, {}};
  StageBackward backward = small_backward(weight);
  expect_error<std::logic_error>([&] { backward.weight_half(); }, "weight_half() is called before input_half().");
  backward.input_half(gradients);
  expect_error<std::logic_error>([&] { backward.input_half(gradients); },
                                 "input_half() is called after input_half(). Only weight_half() is left to run.");
  expect_error<std::logic_error>([&] { backward.full(gradients); },
                                 "full() is called after input_half(). Only weight_half() is left to run.");
  expect_error<std::logic_error>([&] { backward.add_output(weight); },
                                 "add_output() is called after the backward has begun.");
  backward.weight_half();
  EXPECT_TRUE(weight.grad().defined());
  expect_error<std::logic_error>([&] { backward.weight_half(); },
                                 "weight_half() is called on a backward that has already run.");
  expect_error<std::logic_error>([&] { backward.full(gradients); },
                                 "full() is called on a backward that has already run.");
  expect_error<std::logic_error>([&] { backward.add_output(weight); },
                                 "add_output() is called after the backward has begun.");
  backward = small_backward(weight);
  backward.full(gradients);
  expect_error<std::logic_error>([&] { backward.input_half(gradients); },
                                 "input_half() is called on a backward that has already run.");
  StageInputs inputs({numbers({2, 3})}, {true});
  const StageBackward first(std::move(inputs), {});
  expect_error<std::logic_error>(
      // NOLINTNEXTLINE(bugprone-use-after-move,clang-analyzer-cplusplus.Move): that is the fault
      [&] { StageBackward(std::move(inputs), {}); },
      "the inputs of this StageBackward have been moved to another one.");
}

TEST(StageBackward, TakesAnOutputThatComesLater) {
  const at::Tensor weight = parameter({3, 3});
  StageInputs inputs({numbers({2, 3})}, {true});
  const at::Tensor x = inputs.tensors()[0];
  StageBackward backward(std::move(inputs), {x.sin()});
  backward.add_output(x.mm(weight).sum());
  const Tensors gradients = backward.full({{}, at::ones({})});
  EXPECT_TRUE(at::allclose(gradients[0], weight.sum(1).expand({2, 3})));
  EXPECT_TRUE(weight.grad().defined());
}

TEST(StageBackward, RefusesGradientsThatDoNotFit) {
  StageBackward backward = small_backward(parameter({3, 3}));
  expect_error<std::invalid_argument>([&] { backward.full({at::ones({2, 3})}); },
                                      "full(): found 1 gradients, expected 3, one for each output of the stage.");
  expect_error<std::invalid_argument>(
      [&] { backward.input_half({{}, at::ones({3}), {}}); },
      "gradient of output 1: found shape [3], expected [3, 3], the shape of the output.");
  // Nothing has run, so the backward can still be run. The gradient of an output that requires none is ignored.
  backward.full({at::ones({2, 3}), {}, at::ones({7})});
}

TEST(StageBackward, DoesNothingInTheFirstHalfWhenNoInputNeedsAGradient) {
  const Gradients halves = by_halves({.forward = [](auto& in, auto& p) { return Tensors{in[0].mm(p[0]).sin()}; },
                                      .received = {numbers({2, 3})},
                                      .parameters = {numbers({3, 3})},
                                      .needs_grad = {false}});
  EXPECT_EQ(halves.first, Operators());
  EXPECT_FALSE(halves.inputs[0][0].defined());
  EXPECT_TRUE(halves.parameters[0].defined());
}

TEST(StageBackward, LeavesTheParametersOfProductsToTheSecondHalf) {
  struct Product {
    std::string name;
    // Operators that compute the gradient of the input, and of the parameter.
    std::string first;
    std::string second;
    Stage stage;
  };
  const at::Tensor x = numbers({4, 6});
  const at::Tensor batches = numbers({3, 4, 6});
  const at::Tensor w = numbers({6, 6}, 2);
  const at::Tensor b = numbers({6}, 3);
  const std::vector<Product> products = {
      {"linear", "mm", "mm", {[](auto& in, auto& p) { return Tensors{at::linear(in[0], p[0], p[1])}; }, {x}, {w, b}}},
      {"mm", "mm", "mm", {[](auto& in, auto& p) { return Tensors{in[0].mm(p[0])}; }, {x}, {w}}},
      {"mv", "mv", "ger", {[](auto& in, auto& p) { return Tensors{p[0].mv(in[0])}; }, {b}, {w}}},
      {"addmv", "mv", "ger", {[](auto& in, auto& p) { return Tensors{at::addmv(p[1], p[0], in[0])}; }, {b}, {w, b}}},
      {"bmm",
       "bmm",
       "bmm",
       {[](auto& in, auto& p) { return Tensors{in[0].bmm(p[0])}; }, {batches}, {numbers({3, 6, 2})}}},
      {"baddbmm",
       "bmm",
       "bmm",
       {[](auto& in, auto& p) { return Tensors{at::baddbmm(p[1], in[0], p[0])}; }, {batches}, {numbers({3, 6, 6}), b}}},
      {"addbmm",
       "bmm",
       "bmm",
       {[](auto& in, auto& p) { return Tensors{at::addbmm(p[1], in[0], p[0])}; }, {batches}, {numbers({3, 6, 6}), x}}},
      {"bilinear",
       "_trilinear",
       "_trilinear",
       {[](auto& in, auto& p) { return Tensors{at::bilinear(in[0], in[0].detach(), p[0])}; },
        {x},
        {numbers({3, 6, 6})}}},
      {"convolution",
       "convolution_backward",
       "convolution_backward",
       {[](auto& in, auto& p) { return Tensors{at::conv1d(in[0], p[0])}; }, {batches}, {numbers({2, 4, 3})}}},
      {"linear of nested tensors",
       "linear_backward",
       "linear_backward",
       {[](auto& in, auto& p) {
          return Tensors{at::linear(at::_nested_tensor_from_tensor_list({in[0], p[0]}), p[0]).to_padded_tensor(0)};
        },
        {x},
        {w}}}};
  for (const Product& product : products) {
    const Gradients halves = by_halves(product.stage);
    EXPECT_EQ(count(halves.first, product.first), 1) << product.name;
    EXPECT_EQ(count(halves.second, product.second), 1) << product.name;
  }
}

TEST(StageBackward, RunsACustomFunctionOnce) {
  const Stage stage = {[](auto& in, auto& p) { return Tensors{TwoProducts::apply(in[0].sin(), p[0])[0]}; },
                       {numbers({3})},
                       {numbers({3}, 2)}};
  TwoProducts::backwards = 0;
  by_halves(stage);
  EXPECT_EQ(TwoProducts::backwards, 1);
}

TEST(StageBackward, RunsTheNodeOfAnRnnOnce) {
  const Stage stage = {[](auto& in, auto& p) {
                         return Tensors{std::get<0>(at::lstm(in[0], {in[1], in[1]}, p, /*has_biases=*/true, 1, 0.0,
                                                             /*train=*/true, false, false))};
                       },
                       {numbers({3, 2, 5}), numbers({1, 2, 4})},
                       {numbers({16, 5}), numbers({16, 4}), numbers({16}), numbers({16}, 2)}};
  const Gradients halves = by_halves(stage);
  EXPECT_EQ(count(halves.first, "mkldnn_rnn_layer_backward"), 1);
  EXPECT_EQ(count(halves.second, "mkldnn_rnn_layer_backward"), 0);
}

// Calls a function after a gradient was accumulated.
class AfterAccumulation : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit AfterAccumulation(std::function<void(const at::Tensor&)> act) : act_(std::move(act)) {}
  void operator()(const at::Tensor& tensor) override { act_(tensor); }

 private:
  std::function<void(const at::Tensor&)> act_;
};

TEST(StageBackward, CallsTheHooksOfAParameterOnceInTheSecondHalf) {
  const at::Tensor weight = parameter({3, 3});
  std::vector<std::string> calls;
  weight.register_hook([&](const at::Tensor& gradient) {
    calls.emplace_back("before");
    return gradient * 2;
  });
  torch::autograd::impl::set_post_acc_grad_hooks(
      weight, std::make_unique<AfterAccumulation>([&](const at::Tensor&) { calls.emplace_back("after"); }));
  StageInputs inputs({numbers({2, 3})}, {true});
  const at::Tensor x = inputs.tensors()[0];
  // The parameter is used by two products, by a node that runs once, and apart from the inputs.
  const at::Tensor output = TwoProducts::apply(x.mm(weight).mm(weight), weight[0].expand({2, 3}))[0];
  StageBackward backward(std::move(inputs), {output, weight * 2});
  backward.input_half({at::ones({2, 3}), at::ones({3, 3})});
  EXPECT_EQ(calls, std::vector<std::string>());
  backward.weight_half();
  EXPECT_EQ(calls, (std::vector<std::string>{"before", "after"}));
}

// Changes the results of a node.
class Negate : public torch::autograd::FunctionPostHook {
 public:
  explicit Negate(int* calls) : calls_(calls) {}
  Tensors operator()(const Tensors& outputs, const Tensors& /*inputs*/) override {
    ++*calls_;
    Tensors result;
    for (const at::Tensor& output : outputs) result.push_back(output.defined() ? -output : output);
    return result;
  }

 private:
  int* calls_;
};

TEST(StageBackward, CallsHooksInsideOnceAndUsesWhatTheyGive) {
  std::vector<int> calls(4);
  at::Tensor kept;
  Stage stage = {.forward =
                     [&](auto& in, auto& p) {
                       in[0].register_hook([&](const at::Tensor& gradient) { return ++calls[0], gradient * 3; });
                       at::Tensor x = in[0].mm(p[0]);
                       x.register_hook([&](const at::Tensor& gradient) { return ++calls[1], gradient * 5; });
                       x.retain_grad();
                       kept = x;
                       x = x.sin() * p[1];
                       x.register_hook([&](const at::Tensor& gradient) { return ++calls[2], gradient * 7; });
                       x = x.mm(p[0]);
                       x.grad_fn()->add_post_hook(std::make_unique<Negate>(&calls[3]));
                       return Tensors{x};
                     },
                 .received = {numbers({2, 3})},
                 .parameters = {numbers({3, 3}), numbers({3})}};
  const Gradients whole = by_full(stage);
  const at::Tensor kept_by_whole = kept.grad();
  calls.assign(4, 0);
  const Gradients halves = by_halves(stage);
  EXPECT_EQ(calls, std::vector<int>({1, 1, 1, 1}));
  EXPECT_TRUE(same(kept_by_whole, kept.grad()));
  expect_same(whole, halves);
}

using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;
Weak weak(const at::Tensor& tensor) {
  return tensor.storage().getWeakStorageImpl();
}

// x -> sin -> exp -> (mm with a weight) -> sigmoid -> cos -> (times a scale) -> tanh, and beside it weight -> exp.
struct Chain {
  StageBackward backward;
  Weak received;    // saved by sin
  Weak factor;      // saved by exp and mm
  Weak activation;  // saved by sigmoid and cos
  Weak scaled;      // saved by the product with the scale
  Weak output;      // saved by tanh
  Weak of_the_weight;

  std::vector<bool> alive() const {
    return {!received.expired(), !factor.expired(), !activation.expired(),
            !scaled.expired(),   !output.expired(), !of_the_weight.expired()};
  }
};

Chain chain(const at::Tensor& weight, const at::Tensor& scale, const std::function<void()>& in_between = [] {}) {
  StageInputs inputs({numbers({2, 3})}, {true});
  const at::Tensor received = inputs.tensors()[0];
  const at::Tensor factor = received.sin().exp();
  factor.register_hook([in_between](const at::Tensor& gradient) { return in_between(), gradient; });
  const at::Tensor activation = factor.mm(weight).sigmoid();
  const at::Tensor scaled = activation.cos();
  const at::Tensor output = (scaled * scale).tanh();
  const at::Tensor of_the_weight = weight.exp();
  return {StageBackward(std::move(inputs), {output, of_the_weight}),
          weak(received),
          weak(factor),
          weak(activation),
          weak(scaled),
          weak(output),
          weak(of_the_weight)};
}

TEST(StageBackward, KeepsBetweenTheHalvesOnlyWhatTheSecondNeeds) {
  const at::Tensor weight = parameter({3, 3});
  const at::Tensor scale = parameter({3});
  const Tensors gradients = {at::ones({2, 3}), at::ones({3, 3})};
  std::vector<bool> during;
  Chain* running = nullptr;
  Chain one = chain(weight, scale, [&] { during = running->alive(); });
  running = &one;
  EXPECT_EQ(one.alive(), std::vector<bool>({true, true, true, true, true, true}));
  one.backward.input_half(gradients);
  // The input half releases what it has passed while it still runs.
  EXPECT_EQ(during, std::vector<bool>({true, true, false, false, false, true}));
  EXPECT_EQ(one.alive(), std::vector<bool>({false, true, false, false, false, true}));
  one.backward.weight_half();
  EXPECT_EQ(one.alive(), std::vector<bool>(6, false));
}

TEST(StageBackward, LetsACustomFunctionGoWhenItHasRun) {
  StageInputs inputs({numbers({3})}, {true});
  const at::Tensor weight = parameter({3});
  at::Tensor output = TwoProducts::apply(inputs.tensors()[0].sin(), weight)[0];
  auto* node = dynamic_cast<torch::autograd::CppNode<TwoProducts>*>(output.grad_fn().get());
  ASSERT_NE(node, nullptr);
  const Weak stored = weak(node->ctx_.saved_data.at("product").toTensor());
  StageBackward backward(std::move(inputs), {output});
  output.reset();
  EXPECT_FALSE(stored.expired());
  backward.input_half({at::ones({3})});
  EXPECT_TRUE(stored.expired());
}

TEST(StageBackward, SumsWhatWasBroadcastBeforeItIsKept) {
  const Gradients halves =
      by_halves({[](auto& in, auto& p) { return Tensors{in[0] + p[0]}; }, {numbers({5, 3})}, {numbers({3})}});
  EXPECT_EQ(count(halves.first, "sum"), 1);
  EXPECT_EQ(count(halves.second, "sum"), 0);
}

TEST(StageBackward, ReleasesAllInTheWholeBackwardAndWhenItIsNotRun) {
  const at::Tensor weight = parameter({3, 3});
  const at::Tensor scale = parameter({3});
  const Tensors gradients = {at::ones({2, 3}), at::ones({3, 3})};
  Chain one = chain(weight, scale);
  one.backward.full(gradients);
  EXPECT_EQ(one.alive(), std::vector<bool>(6, false));

  Chain other = chain(weight, scale);
  {
    const StageBackward gone = std::move(other.backward);
  }
  EXPECT_EQ(other.alive(), std::vector<bool>(6, false));

  Chain half = chain(weight, scale);
  half.backward.input_half(gradients);
  {
    const StageBackward gone = std::move(half.backward);
  }
  EXPECT_EQ(half.alive(), std::vector<bool>(6, false));
}

TEST(StageBackward, LetsGoOfTheGradientsThatItKept) {
  const at::Tensor weight = parameter({3, 3});
  StageBackward backward = small_backward(weight);
  at::Tensor gradient = at::ones({2, 3});
  const Weak given = weak(gradient);
  const Tensors of_inputs = backward.input_half({std::exchange(gradient, {}), {}, {}});
  EXPECT_TRUE(given.expired());
  const Weak returned = weak(of_inputs[0]);
  EXPECT_EQ(returned.use_count(), 1U);
  backward.weight_half();
  EXPECT_EQ(weight.grad().storage().use_count(), 1U);
}

TEST(StageBackward, GivesEachParameterAGradientOfItsOwn) {
  const Stage stage = {
      .forward = [](auto& in, auto& p) { return Tensors{in[0].view({-1}) + p[0].view({-1}) + p[1].view({-1})}; },
      .received = {numbers({2, 3})},
      .parameters = {numbers({2, 3}), numbers({2, 3})},
      .microbatches = 2};
  const at::Tensor expected = numbers({6}, 5).view({2, 3});
  for (const Gradients& gradients : {by_full(stage), by_halves(stage)}) {
    for (const Tensors& of_inputs : gradients.inputs) EXPECT_TRUE(same(expected, of_inputs[0]));
    for (const at::Tensor& of_parameter : gradients.parameters) EXPECT_TRUE(same(expected * 2, of_parameter));
  }
  expect_same_in_halves(stage);
}

TEST(StageBackward, LeavesAGradientThatIsPartOfABufferInIt) {
  const at::Tensor weight = parameter({3, 3});
  const at::Tensor buffer = at::zeros({12});
  weight.mutable_grad() = buffer.narrow(0, 3, 9).view({3, 3});
  StageBackward backward = small_backward(weight);
  backward.input_half({at::ones({2, 3}), {}, {}});
  backward.weight_half();
  EXPECT_TRUE(weight.grad().is_alias_of(buffer));
  EXPECT_NE(buffer[5].item<float>(), 0);
}

TEST(StageBackward, IsGoneWhenItFails) {
  const at::Tensor weight = parameter({3, 3});
  const Tensors gradients = {at::ones({2, 3})};
  for (const bool in_the_first : {true, false}) {
    StageInputs inputs({numbers({2, 3})}, {true});
    const at::Tensor x = inputs.tensors()[0];
    at::Tensor saved = x.sin().exp();
    const Weak activation = weak(saved);
    const at::Tensor output = in_the_first ? Failing::apply(saved.mm(weight), weight[0]).mm(weight)
                                           : saved.mm(Failing::apply(weight, weight)).mm(weight);
    StageBackward backward(std::move(inputs), {output});
    saved.reset();
    const auto run = [&] {
      backward.input_half(gradients);
      EXPECT_FALSE(in_the_first);
      backward.weight_half();
    };
    EXPECT_THROW(run(), std::runtime_error);
    EXPECT_THROW(backward.weight_half(), std::logic_error);
  }
}

TEST(StageBackward, RefusesAParameterThatChangedBetweenTheHalves) {
  const at::Tensor weight = parameter({3, 3});
  StageBackward backward = small_backward(weight);
  backward.input_half({at::ones({2, 3}), {}, {}});
  weight.detach().add_(1);
  EXPECT_THROW(backward.weight_half(), c10::Error);
}

// The graph is so deep that a recursive walk, run or release would overflow the stack.
TEST(StageBackward, IsAsDeepAsAGraphMayBe) {
  const at::Tensor scale = parameter({1, 1});
  const auto deep = [&](bool fails = false) {
    StageInputs inputs({at::ones({1, 1})}, {true});
    at::Tensor x = inputs.tensors()[0];
    if (fails) x = Failing::apply(x, scale);
    for (int i = 0; i < 100'000; ++i) x = i % 3 == 0 ? x * scale : i % 3 == 1 ? x.mm(scale) : x.sigmoid();
    return StageBackward(std::move(inputs), {x});
  };
  {
    const StageBackward never_run = deep();
  }
  {
    StageBackward half = deep();
    EXPECT_TRUE(half.input_half({at::ones({1, 1})})[0].defined());
  }
  EXPECT_THROW(deep(/*fails=*/true).input_half({at::ones({1, 1})}), std::runtime_error);
  StageBackward all = deep();
  all.input_half({at::ones({1, 1})});
  all.weight_half();
  EXPECT_TRUE(scale.grad().defined());
}

}  // namespace
}  // namespace penstock::internal::testing
