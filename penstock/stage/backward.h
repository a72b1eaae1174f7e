// The backward of one microbatch through one stage: whole (B), or in two halves. The input half (I) computes the
// gradients of what the stage received, for which the previous stage waits. The weight half (W) computes those of the
// parameters, for which no other stage waits, so that a schedule can run it where a rank would be idle.
//
//   StageInputs inputs(received, needs_grad);
//   std::vector<at::Tensor> outputs = module(inputs.tensors());
//   StageBackward backward(std::move(inputs), outputs);
//   …
//   send(backward.input_half(output_gradients));
//   …
//   backward.weight_half();
//
// Whole and split, the gradients are bitwise identical and the same operators run. Autograd itself accumulates
// gradients of parameters into .grad, in the weight half only, so that hooks on parameters see once what they would see
// in a whole backward. Hooks on tensors inside the stage are called once too, in the half that reaches them first. A
// gradient that autograd made a .grad although its storage is shared is copied: it belongs to its parameter alone.
//
// A node of the graph that leads to an input runs in the input half, any other in the weight half. Where a node leads
// both to an input and to a parameter, both gradients are computed in the input half and that of the parameter's side
// is saved; but a product (linear, matmul, convolution) saves the incoming gradient and computes its parameter's side
// in the weight half. Its factors stay alive until then, and a parameter must not be written to between the halves:
// autograd would refuse it.
//
// The halves follow libtorch's order of nodes, which is that of the operators in a forward on one thread. On the CPU a
// backward runs on the thread that calls it. A StageBackward is used by one thread at a time; those of several threads
// may have parameters in common.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>
#include <vector>

namespace penstock::internal {

// The tensors with which a stage's forward starts.
class StageInputs {
 public:
  // A tensor that needs a gradient, and is of a differentiable dtype, enters as an alias of the received one, whose
  // history begins here. It is neither a leaf nor a view, so that the stage may write into it in place, and has a
  // version counter of its own. The others enter as aliases without history, and undefined ones as they are.
  StageInputs(const std::vector<at::Tensor>& received, const std::vector<bool>& needs_grad);
  ~StageInputs();

  StageInputs(StageInputs&&) noexcept;
  StageInputs& operator=(StageInputs&&) noexcept;
  StageInputs(const StageInputs&) = delete;
  StageInputs& operator=(const StageInputs&) = delete;

  const std::vector<at::Tensor>& tensors() const { return tensors_; }
  // Moves the tensors to the caller. Memory that no operator saves is freed when the caller releases them.
  std::vector<at::Tensor> take() { return std::exchange(tensors_, {}); }

 private:
  friend class StageBackward;
  struct Start;

  std::vector<at::Tensor> tensors_;
  std::unique_ptr<Start> start_;
};

// The graph of one forward. It holds no output, and an input only where an operator saved it. Each half releases what
// only it needed while it runs, and destroying a StageBackward releases everything that has not run.
class StageBackward {
 public:
  // Outputs that require no gradient, and undefined ones, keep their indices. A loss is an output like any other; its
  // gradient is the seed.
  StageBackward(StageInputs inputs, const std::vector<at::Tensor>& outputs);
  ~StageBackward();

  StageBackward(StageBackward&&) noexcept;
  StageBackward& operator=(StageBackward&&) noexcept;
  StageBackward(const StageBackward&) = delete;
  StageBackward& operator=(const StageBackward&) = delete;

  // Appends an output. Throws std::logic_error once a backward has begun.
  void add_output(const at::Tensor& output);

  // Each takes a gradient for each output, undefined where none flows (ignored for an output that requires none), and
  // returns a gradient for each input, undefined where none arrived. A returned tensor may be one that was passed in,
  // or share its storage with another: it must not be written to.
  //
  // Either full() is called once, or input_half() and then weight_half(). Anything else throws std::logic_error.
  // Gradients that do not fit throw std::invalid_argument before anything has run. After any later failure the graph is
  // released.
  std::vector<at::Tensor> full(std::vector<at::Tensor> output_gradients);
  std::vector<at::Tensor> input_half(std::vector<at::Tensor> output_gradients);
  void weight_half();

 private:
  struct Graph;
  struct Roots;

  // Returns the roots at the outputs through which a gradient flows.
  Roots roots(const char* caller, std::vector<at::Tensor> gradients) const;

  // The part of the graph that has not run yet; null when all has.
  std::unique_ptr<Graph> graph_;
};

}  // namespace penstock::internal
