// checkpoint() on its own: gradients are bitwise those without it, and misuse is refused.
#include "penstock/stage/recomputation.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "penstock/stage/checkpoint.h"
#include "penstock/stage/wiring.h"
#include "penstock/tensor/autocast_scope.h"
#include "penstock/tensor/random_scope.h"
#include "tests/stage/recomputed_part.h"
#include "tests/stage/stages.h"
#include "tests/thrown.h"

namespace penstock::internal::testing {
namespace {

at::Tensor leaf(at::IntArrayRef shape, std::int64_t seed = 1) {
  return numbers(shape, seed).clone().requires_grad_();
}

using Part = std::function<at::Tensor(const at::Tensor&)>;

// Returns the result of a function and the gradients of its input and parameters, with or without a checkpoint.
Tensors results_of(const Part& function, const Tensors& parameters, bool checkpointed) {
  const at::Tensor x = leaf({4, 4}, 9);
  const at::Tensor y = checkpointed ? checkpoint(function, x) : function(x);
  Tensors leaves = parameters;
  leaves.push_back(x);
  Tensors results = torch::autograd::grad({y.sum()}, leaves);
  results.push_back(y.detach());
  return results;
}

// Expects bitwise the same with a checkpoint, and one recomputation.
void expect_the_same_with_a_checkpoint(const Part& function, const Tensors& parameters = {}) {
  const Tensors expected = results_of(function, parameters, /*checkpointed=*/false);
  const CountedParts counted;
  const Tensors found = results_of(function, parameters, /*checkpointed=*/true);
  EXPECT_EQ(counted.made(), 1);
  EXPECT_EQ(counted.recomputed(), 1);
  ASSERT_EQ(expected.size(), found.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(at::equal(expected[i], found[i])) << i << "\n" << expected[i] << "\n" << found[i];
  }
}

TEST(Checkpoint, WithinAnotherOneIsPartOfIt) {
  const at::Tensor w = leaf({4, 4});
  expect_the_same_with_a_checkpoint(
      [=](const at::Tensor& x) {
        const at::Tensor y = checkpoint([=](const at::Tensor& input) { return at::matmul(input, w).exp(); }, x);
        return checkpoint([=](const at::Tensor& input) { return input.tanh() * input; }, y);
      },
      {w});
}

// Saves an output and an undefined tensor.
class ExpAndNothing : public torch::autograd::Function<ExpAndNothing> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    at::Tensor y = x.exp();
    context->save_for_backward({y, at::Tensor(), x});
    return y;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    EXPECT_FALSE(saved[1].defined());
    return {gradients[0] * saved[0] * saved[2].sign().square()};
  }
};

TEST(Checkpoint, KnowsFunctionsThatSaveAnOutputAndAnUndefinedTensor) {
  expect_the_same_with_a_checkpoint([](const at::Tensor& x) { return ExpAndNothing::apply(x * 2) * x; });
}

TEST(Checkpoint, HasTheAutocastOfItsForward) {
  const at::Tensor w = leaf({4, 4});
  const auto layer = [=](const at::Tensor& x) { return at::matmul(x, w).exp().to(at::kFloat); };
  // The backward, and with it the recomputation, runs outside of the scope.
  expect_the_same_with_a_checkpoint(
      [=](const at::Tensor& x) {
        const AutocastScope autocast(at::kCPU, at::kBFloat16);
        return layer(x);
      },
      {w});
  const auto gradients = [&](bool checkpointed) {
    const at::Tensor x = leaf({4, 4}, 9);
    at::Tensor y;
    {
      const AutocastScope autocast(at::kCPU, at::kBFloat16);
      y = checkpointed ? checkpoint(layer, x) : layer(x);
    }
    return torch::autograd::grad({y.sum()}, {x, w});
  };
  const Tensors expected = gradients(false);
  const Tensors found = gradients(true);
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(at::equal(expected[i], found[i])) << i;
}

TEST(Checkpoint, DrawsTheSameNumbersOutsideOfARandomScope) {
  const auto seeded = [](bool checkpointed) {
    at::manual_seed(5);
    Tensors results =
        results_of([](const at::Tensor& x) { return at::dropout(x * 2, 0.5, true) * x; }, {}, checkpointed);
    // The generator goes on as if nothing had been computed again.
    results.push_back(at::rand({4}));
    return results;
  };
  const Tensors expected = seeded(false);
  const Tensors found = seeded(true);
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(at::equal(expected[i], found[i])) << i;
}

TEST(Checkpoint, TakesVectorsOptionalTensorsAndOtherValues) {
  const CountedParts counted;
  const at::Tensor a = leaf({4});
  const at::Tensor b = leaf({4}, 2);
  const at::Tensor c = leaf({4}, 3);
  const auto function = [](const std::vector<at::Tensor>& tensors, const std::optional<at::Tensor>& maybe,
                           const std::optional<at::Tensor>& nothing, double scale, const std::string& name) {
    EXPECT_EQ(name, "a name");
    EXPECT_FALSE(nothing.has_value());
    return (tensors[0].exp() * tensors[1].sin() * maybe->cos()) * scale;
  };
  const at::Tensor plain_result = function({a, b}, c, std::nullopt, 1.5, "a name");
  const Tensors expected = torch::autograd::grad({plain_result.sum()}, {a, b, c});
  const at::Tensor y = checkpoint(function, std::vector<at::Tensor>{a, b}, std::optional<at::Tensor>(c),
                                  std::optional<at::Tensor>(), 1.5, std::string("a name"));
  const Tensors found = torch::autograd::grad({y.sum()}, {a, b, c});
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(at::equal(expected[i], found[i])) << i;
  EXPECT_EQ(counted.recomputed(), 1);
}

TEST(Checkpoint, SeesWritesToAnOptionalTensor) {
  const at::Tensor x = leaf({4}).detach();
  EXPECT_NE(message_of<StageError>([&] {
              checkpoint([](std::optional<at::Tensor> input) { return input->mul_(2); }, std::optional<at::Tensor>(x));
            }).find("input 0 of a part of a forward that is recomputed was written to by its forward"),
            std::string::npos);
}

// Lists that refer to the caller's tensors would be gone by the time of the backward.
template <class Input>
concept CanBeCheckpointed =
    requires(Input input) { checkpoint([](const Input& /*input*/) { return at::Tensor(); }, input); };
static_assert(CanBeCheckpointed<std::vector<at::Tensor>>);
static_assert(!CanBeCheckpointed<at::TensorList>);
static_assert(!CanBeCheckpointed<at::IntArrayRef>);

TEST(Checkpoint, MakesNoPartWithoutAutograd) {
  const CountedParts counted;
  {
    const at::NoGradGuard no_grad;
    const at::Tensor x = numbers({4});
    EXPECT_TRUE(at::equal(checkpoint([](const at::Tensor& input) { return input.exp(); }, x), x.exp()));
  }
  EXPECT_EQ(counted.made(), 0);
}

TEST(Checkpoint, KnowsNestedTensors) {
  PENSTOCK_ON_CPU_ALONE("the simulated device has no nested tensors");
  const at::Tensor w = leaf({4, 4});
  expect_the_same_with_a_checkpoint(
      [=](const at::Tensor& x) {
        return at::linear(at::_nested_tensor_from_tensor_list({x, x.narrow(0, 0, 2)}), w).to_padded_tensor(0);
      },
      {w});
}

TEST(Checkpoint, CanBeComputedAgainAfterAFailure) {
  const at::Tensor w = leaf({4, 4});
  const at::Tensor x = leaf({4, 4}, 2);
  int calls = 0;
  const auto function = [&, w](const at::Tensor& input) {
    const at::Tensor hidden = at::matmul(input, w).exp();
    if (++calls == 2) throw std::runtime_error("out of steam");
    return hidden.tanh();
  };
  const at::Tensor y = checkpoint(function, x);
  EXPECT_EQ(message_of([&] { torch::autograd::grad({y.sum()}, {w}, {}, /*retain_graph=*/true); }), "out of steam");
  const Tensors found = torch::autograd::grad({y.sum()}, {w});
  EXPECT_TRUE(at::equal(found[0], torch::autograd::grad({at::matmul(x, w).exp().tanh().sum()}, {w})[0]));
}

TEST(RecomputedPart, FindsItsInputsUnchangedAfterAFailure) {
  const at::Tensor w = leaf({4});
  at::Tensor x = numbers({4}, 2);
  int calls = 0;
  const auto function = [&, w](const Tensors& inputs) {
    at::Tensor result = inputs[0].add_(1) * w;
    if (++calls == 2) throw std::runtime_error("out of steam");
    return result;
  };
  const at::Tensor expected = torch::autograd::grad({function({x.clone()}).sum()}, {w})[0];
  calls = 0;
  // Nothing but the part refers to the input.
  RecomputedPartScope scope({x}, {.writes_arguments = true});
  const at::Tensor y = function({x.clone()});
  x.reset();
  scope.close([&](const Tensors& inputs) { function(inputs); });
  EXPECT_EQ(message_of([&] { torch::autograd::grad({y.sum()}, {w}, {}, /*retain_graph=*/true); }), "out of steam");
  EXPECT_TRUE(at::equal(torch::autograd::grad({y.sum()}, {w})[0], expected));
}

TEST(StageHistory, LeavesConstantBuffersOut) {
  StageModule module;
  module.buffers = {{"mask", at::ones({2})}, {"count", at::zeros({})}};
  module.constant_buffers = {"mask"};
  module.state = {{"calls", at::zeros({})}};
  const NamedTensors written = module.written_tensors();
  ASSERT_EQ(written.size(), 2U);
  EXPECT_EQ(written[0].first, "calls");
  EXPECT_EQ(written[1].first, "count");
  StageHistory history(module);
  EXPECT_FALSE(history.writes_to(module.buffers[0].second));
  EXPECT_TRUE(history.writes_to(module.buffers[1].second));
  EXPECT_EQ(history.now().values.size(), 2U);
}

TEST(Checkpoint, KeepsTheTypesOfNestedContainers) {
  using Pair = std::tuple<at::Tensor, at::Tensor>;
  c10::List<Pair> pairs;
  pairs.push_back({leaf({4}), leaf({4}, 2)});
  std::vector<c10::TypePtr> types;
  const auto function = [&](const c10::IValue& value) {
    types.push_back(value.type());
    const auto& elements = value.toListRef()[0].toTupleRef().elements();
    return elements[0].toTensor().exp() * elements[1].toTensor();
  };
  checkpoint(function, c10::IValue(pairs)).sum().backward();
  ASSERT_EQ(types.size(), 2U);
  EXPECT_EQ(types[1]->repr_str(), types[0]->repr_str());
}

TEST(Checkpoint, RefusesARandomScopeAroundItsBackwardAlone) {
  PENSTOCK_ON_CPU_ALONE("the engine's threads for devices refuse to draw in it already");
  const at::Tensor x = leaf({4});
  const at::Tensor y = checkpoint([](const at::Tensor& input) { return at::dropout(input.exp(), 0.5, true); }, x);
  const RandomScope scope(/*seed=*/0, /*step=*/0, /*microbatch=*/0, /*place=*/0);
  EXPECT_EQ(
      message_of<StageError>([&] { y.sum().backward(); }),
      "a part whose forward was in no RandomScope is computed again within one.\n  Hint: run the backward outside "
      "of it, or the forward in it.");
}

TEST(Checkpoint, RefusesTheGraphOfAForwardThatFailed) {
  at::Tensor escaped;
  const at::Tensor x = leaf({4});
  EXPECT_THROW(checkpoint(
                   [&](const at::Tensor& input) -> at::Tensor {
                     escaped = input.exp();
                     throw std::runtime_error("too late");
                   },
                   x),
               std::runtime_error);
  EXPECT_EQ(message_of<StageError>([&] { escaped.sum().backward(); }),
            "the forward of a part that is recomputed has failed, so nothing has a backward through it.");
}

TEST(Checkpoint, RefusesABackwardWithinThePart) {
  const at::Tensor x = leaf({4});
  EXPECT_EQ(message_of<StageError>([&] {
              checkpoint([](const at::Tensor& input) { return torch::autograd::grad({input.exp().sum()}, {input})[0]; },
                         x);
            }),
            "a part of a forward that is recomputed runs a backward itself.\n  Hint: recompute the parts around it.");
}

TEST(Checkpoint, RefusesAParameterThatWasModifiedMeanwhile) {
  struct Weight {
    at::Tensor w;
    bool transposed;
  };
  // A linear layer saves a view of its weight; a parameter may be a view of a flat buffer.
  for (const auto& [w, transposed] : {Weight{leaf({4, 4}), false}, Weight{leaf({4, 4}), true},
                                      Weight{numbers({20}).narrow(0, 4, 16).view({4, 4}).requires_grad_(), false}}) {
    const at::Tensor y =
        checkpoint([weight = w, is_linear = transposed](
                       const at::Tensor& x) { return is_linear ? at::linear(x, weight) : at::matmul(x, weight); },
                   leaf({2, 4}, 2));
    {
      const at::NoGradGuard no_grad;
      w.mul_(2);
    }
    const std::string error = message_of<StageError>([&] { y.sum().backward(); });
    EXPECT_EQ(error,
              "a parameter of shape [4, 4] was modified between a forward and its recomputation.\n  Hint: step the "
              "optimizer after the backwards.");
  }
}

TEST(Checkpoint, RefusesATensorThatWasModifiedAfterItHadBeenSaved) {
  const at::Tensor y = checkpoint(
      [](const at::Tensor& x) {
        at::Tensor h = x * 2;
        const at::Tensor z = h.sigmoid() * h;
        h.add_(1);
        return z;
      },
      leaf({2, 4}));
  EXPECT_EQ(message_of<StageError>([&] { y.sum().backward(); }),
            "a tensor of shape [2, 4] that a backward needs was modified in place after it had been computed again.");
}

TEST(Checkpoint, SeesItsInputsInTheirStorage) {
  // The offset counts from the beginning of the storage, as in a program that was exported with as_strided.
  const auto function = [](const at::Tensor& x) { return x.detach().as_strided({2}, {1}, 1).exp() * x; };
  const auto gradient = [&](bool checkpointed) {
    const at::Tensor base = leaf({6});
    const at::Tensor view = base.narrow(0, 2, 2);
    const at::Tensor y = checkpointed ? checkpoint(function, view) : function(view);
    return torch::autograd::grad({y.sum()}, {base})[0];
  };
  EXPECT_TRUE(at::equal(gradient(false), gradient(true)));
}

}  // namespace
}  // namespace penstock::internal::testing
