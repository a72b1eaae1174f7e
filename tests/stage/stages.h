// A stage as a function, for the tests of its backward: it is run whole by autograd, whole by StageBackward and in
// halves, and the operators of each run are counted.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "penstock/stage/backward.h"
#include "tests/device/test_devices.h"
#include "tests/tensor/values.h"

namespace penstock::internal::testing {

using Tensors = std::vector<at::Tensor>;
using Operators = std::map<std::string, int>;

// Returns numbers in [-1, 1] that differ for each seed.
inline at::Tensor numbers(at::IntArrayRef shape, std::int64_t seed = 1, at::ScalarType dtype = at::kFloat) {
  const at::Tensor steps = at::arange(c10::multiply_integers(shape), at::kDouble);
  const at::Tensor sines = (steps * (1.7 + 0.013 * static_cast<double>(seed)) + static_cast<double>(seed)).sin();
  return sines.to(dtype).view(shape).to(test_device(0));
}

// Counts the operators that this thread calls while it lives: none of a backward on a device, which other threads run.
// It does not count operators called by operators, nor those by which a parameter gets its first gradient: whether
// autograd steals or copies it depends on other references to it, which differ between a whole backward and its halves.
class OperatorCount {
 public:
  OperatorCount()
      : handle_(at::addThreadLocalCallback(
            at::RecordFunctionCallback(begin, end).needsOutputs(true).scopes({at::RecordScope::FUNCTION}))) {
    state().counts = {};
  }
  ~OperatorCount() { at::removeCallback(handle_); }

  OperatorCount(const OperatorCount&) = delete;
  OperatorCount& operator=(const OperatorCount&) = delete;

  static Operators counts() { return state().counts; }

 private:
  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
    const std::string node = node_of(function);
    if (node.empty()) {
      ++state().depth;
    } else {
      state().node = node;
    }
    return nullptr;
  }

  static void end(const at::RecordFunction& function, at::ObserverContext* /*context*/) {
    if (!node_of(function).empty()) {
      state().node.clear();
    } else if (--state().depth == 0) {
      count(function);
    }
  }

  // The engine reports each node that it runs as if it were an operator.
  static std::string node_of(const at::RecordFunction& function) {
    constexpr std::string_view kMark = "autograd::engine::evaluate_function: ";
    const std::string_view name = function.name();
    return name.starts_with(kMark) ? std::string(name.substr(kMark.size())) : "";
  }

  static void count(const at::RecordFunction& function) {
    const std::string name = function.name();
    if (state().node == "torch::autograd::AccumulateGrad" && name != "aten::add_") return;
    if (state().node.empty() && name == "aten::clone") return;
    // These compute only the gradients that are needed: each of them counts as one call.
    if (name == "aten::convolution_backward" || name == "aten::linear_backward") {
      for (std::size_t i = 0; i < function.outputs().size(); ++i) {
        if (function.outputs()[i].toTensor().defined()) ++state().counts[name + "[" + std::to_string(i) + "]"];
      }
    } else {
      // The engine adds in place if nothing else refers to the first term.
      ++state().counts[name == "aten::add_" ? "aten::add" : name];
    }
  }

  struct State {
    Operators counts;
    // Nesting of operators that are running.
    int depth = 0;
    // Name of the node that the engine is running.
    std::string node;
  };
  static State& state() {
    thread_local State of_this_thread;
    return of_this_thread;
  }

  at::CallbackHandle handle_;
};

inline Operators operator+(Operators one, const Operators& other) {
  for (const auto& [name, count] : other) one[name] += count;
  return one;
}

struct Stage {
  std::function<Tensors(const Tensors& inputs, const Tensors& parameters)> forward;
  Tensors received;
  Tensors parameters;
  // Empty: all inputs.
  std::vector<bool> needs_grad = {};
  // Indices of the outputs through which no gradient flows.
  std::vector<std::size_t> without_gradient = {};
  int microbatches = 1;
};

inline Tensors copies(const Tensors& tensors) {
  Tensors result;
  for (const at::Tensor& tensor : tensors) {
    result.push_back(tensor.defined() ? tensor.detach().to(test_device(0)).clone() : tensor);
  }
  return result;
}

inline std::vector<bool> needs_grad(const Stage& stage) {
  return stage.needs_grad.empty() ? std::vector<bool>(stage.received.size(), true) : stage.needs_grad;
}

inline Tensors fresh_parameters(const Stage& stage) {
  Tensors result = copies(stage.parameters);
  for (at::Tensor& parameter : result) parameter.requires_grad_();
  return result;
}

// Returns the inputs of a microbatch, with other numbers for each.
inline Tensors received_by(const Stage& stage, int microbatch) {
  Tensors result = copies(stage.received);
  for (at::Tensor& tensor : result) {
    if (tensor.defined() && torch::autograd::isDifferentiableType(tensor.scalar_type()))
      tensor.mul_(1 - 0.3 * microbatch);
  }
  return result;
}

inline Tensors gradients_for(const Stage& stage, const Tensors& outputs) {
  Tensors result;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const bool skipped = std::ranges::find(stage.without_gradient, i) != stage.without_gradient.end();
    const bool has_gradient = outputs[i].defined() && outputs[i].requires_grad() && !skipped;
    result.push_back(has_gradient
                         ? numbers(outputs[i].sizes(), static_cast<std::int64_t>(i) + 5, outputs[i].scalar_type())
                         : at::Tensor());
  }
  return result;
}

// Results of a stage's backward.
struct Gradients {
  // Gradients of the inputs of each microbatch.
  std::vector<Tensors> inputs;
  Tensors parameters;
  // Operators of the input half or of the whole backward, and of the weight half.
  Operators first;
  Operators second;
};

inline Tensors grads(const Tensors& tensors) {
  Tensors result;
  for (const at::Tensor& tensor : tensors) result.push_back(tensor.defined() ? tensor.grad() : at::Tensor());
  return result;
}

// Runs the stage by torch::autograd::backward, with leaves for inputs.
inline Gradients by_autograd(const Stage& stage) {
  const Tensors parameters = fresh_parameters(stage);
  Gradients result;
  for (int microbatch = 0; microbatch < stage.microbatches; ++microbatch) {
    Tensors leaves = received_by(stage, microbatch);
    Tensors inputs;
    for (std::size_t i = 0; i < leaves.size(); ++i) {
      const bool defined = leaves[i].defined();
      const bool has_gradient =
          defined && needs_grad(stage)[i] && torch::autograd::isDifferentiableType(leaves[i].scalar_type());
      if (has_gradient) leaves[i].requires_grad_();
      // A clone is not a leaf, so the stage may write into it.
      inputs.push_back(has_gradient ? leaves[i].clone() : defined ? leaves[i].detach() : leaves[i]);
    }
    const Tensors outputs = stage.forward(inputs, parameters);
    const Tensors gradients = gradients_for(stage, outputs);
    Tensors roots;
    Tensors of_roots;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (!gradients[i].defined()) continue;
      roots.push_back(outputs[i]);
      of_roots.push_back(gradients[i]);
    }
    if (!roots.empty()) torch::autograd::backward(roots, of_roots);
    // Two gradients may share a storage, so that a later addition to one would change both.
    for (const Tensors& tensors : {leaves, parameters}) {
      for (const at::Tensor& tensor : tensors) {
        if (tensor.defined() && tensor.grad().defined()) tensor.mutable_grad() = tensor.grad().clone();
      }
    }
    result.inputs.push_back(grads(leaves));
  }
  result.parameters = grads(parameters);
  return result;
}

struct Forward {
  StageBackward backward;
  Tensors gradients;
};

inline Forward forward(const Stage& stage, const Tensors& parameters, int microbatch = 0) {
  StageInputs inputs(received_by(stage, microbatch), needs_grad(stage));
  const Tensors outputs = stage.forward(inputs.tensors(), parameters);
  return {StageBackward(std::move(inputs), outputs), gradients_for(stage, outputs)};
}

inline Gradients by_full(const Stage& stage) {
  const Tensors parameters = fresh_parameters(stage);
  Gradients result;
  for (int microbatch = 0; microbatch < stage.microbatches; ++microbatch) {
    Forward run = forward(stage, parameters, microbatch);
    const OperatorCount count;
    result.inputs.push_back(run.backward.full(run.gradients));
    result.first = std::move(result.first) + OperatorCount::counts();
  }
  result.parameters = grads(parameters);
  return result;
}

// Runs all input halves before the first weight half.
inline Gradients by_halves(const Stage& stage) {
  const Tensors parameters = fresh_parameters(stage);
  Gradients result;
  std::vector<StageBackward> backwards;
  for (int microbatch = 0; microbatch < stage.microbatches; ++microbatch) {
    Forward run = forward(stage, parameters, microbatch);
    const OperatorCount count;
    result.inputs.push_back(run.backward.input_half(run.gradients));
    result.first = std::move(result.first) + OperatorCount::counts();
    backwards.push_back(std::move(run.backward));
  }
  for (const at::Tensor& gradient : grads(parameters)) EXPECT_FALSE(gradient.defined()) << "in the first half";
  for (StageBackward& backward : backwards) {
    const OperatorCount count;
    backward.weight_half();
    result.second = std::move(result.second) + OperatorCount::counts();
  }
  result.parameters = grads(parameters);
  return result;
}

inline ::testing::AssertionResult same_bits_in(const std::string& what, const Tensors& expected, const Tensors& found) {
  if (expected.size() != found.size()) return ::testing::AssertionFailure() << found.size() << " gradients of " << what;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const bool both = expected[i].defined() && found[i].defined();
    const bool equal =
        both ? expected[i].scalar_type() == found[i].scalar_type() && expected[i].sizes() == found[i].sizes() &&
                   expected[i].device() == found[i].device() && same_bits(expected[i].cpu(), found[i].cpu())
             : expected[i].defined() == found[i].defined();
    if (!equal) {
      return ::testing::AssertionFailure()
             << "the gradients of " << what << " " << i << " differ\nexpected: " << text(expected[i])
             << "\nfound:    " << text(found[i]);
    }
  }
  return ::testing::AssertionSuccess();
}

inline void expect_same(const Gradients& expected, const Gradients& found) {
  ASSERT_EQ(expected.inputs.size(), found.inputs.size());
  for (std::size_t i = 0; i < expected.inputs.size(); ++i) {
    EXPECT_TRUE(same_bits_in("input", expected.inputs[i], found.inputs[i])) << "of microbatch " << i;
  }
  EXPECT_TRUE(same_bits_in("parameter", expected.parameters, found.parameters));
}

// Expects the gradients of autograd from the whole backward, and the same from the halves with the same operators.
inline Gradients expect_same_in_halves(const Stage& stage) {
  // The tensors are too small for several threads to help.
  at::set_num_threads(1);
  const Gradients whole = by_full(stage);
  {
    SCOPED_TRACE("the whole backward against autograd's");
    expect_same(by_autograd(stage), whole);
  }
  SCOPED_TRACE("the halves against the whole");
  Gradients halves = by_halves(stage);
  expect_same(whole, halves);
  if (test_device(0).is_cpu()) {
    EXPECT_EQ(whole.first, halves.first + halves.second);
  }
  return halves;
}

}  // namespace penstock::internal::testing
