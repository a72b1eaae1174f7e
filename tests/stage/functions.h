// Custom autograd functions for the tests of a stage's backward.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <stdexcept>

namespace penstock::internal::testing {

// Returns x * w and 2 * x * w as two outputs of one node, and counts its backwards.
class TwoProducts : public torch::autograd::Function<TwoProducts> {
 public:
  inline static thread_local int backwards = 0;

  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                                                const at::Tensor& w) {
    context->save_for_backward({x, w});
    // Autograd does not release saved_data before the node itself.
    context->saved_data["product"] = x * w;
    return {x * w, x * w * 2};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    ++backwards;
    const auto saved = context->get_saved_variables();
    const at::Tensor sum = gradients[0] + gradients[1] * 2;
    return {sum * saved[1], sum * saved[0]};
  }
};

// A sum whose backward returns the incoming gradient itself for both terms, and does not ask for zeros where none
// arrives.
class Sum : public torch::autograd::Function<Sum> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& one, const at::Tensor& other) {
    context->set_materialize_grads(false);
    return one + other;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 const torch::autograd::variable_list& gradients) {
    return {gradients[0], gradients[0]};
  }
};

// A sum whose backward throws.
class Failing : public torch::autograd::Function<Failing> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& x, const at::Tensor& w) {
    return x + w;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 const torch::autograd::variable_list& /*gradients*/) {
    throw std::runtime_error("no backward today");
  }
};

}  // namespace penstock::internal::testing
