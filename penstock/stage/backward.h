// The backward of one microbatch through one stage: whole (B), or in two halves. The first half (I) gives the gradients
// of what the stage received, for which the stage before it waits; the second (W) gives those of the parameters, for
// which nobody does, so that a schedule can put it where a rank would have nothing to do.
//
//   StageInputs inputs(received, needs_grad);
//   std::vector<at::Tensor> outputs = module(inputs.tensors());
//   StageBackward backward(std::move(inputs), outputs);
//   …
//   send(backward.input_half(gradients_of_outputs));
//   …
//   backward.weight_half();
//
// Both ways give the same gradients, bit for bit, and run the same operators. Gradients of parameters are accumulated
// into .grad by autograd itself, in the second half only, so that hooks on parameters see once what they would see in a
// whole backward. Hooks on tensors inside the stage are called once too, in the half that meets them first. A gradient
// that autograd made a .grad although somebody else holds its storage is copied: it belongs to its parameter alone.
//
// What the halves are: a node of the graph that leads to an input has its turn in the first half, any other in the
// second. Where a node leads both to an input and to a parameter, the gradients of both are computed in the first half,
// and those of the parameter's side are kept; but a product (linear, matmul, convolution) keeps the gradient that
// arrived, and computes its parameter's side in the second half. Its factors stay alive until then, and a parameter
// must not be written to between the halves: autograd would refuse it.
//
// The halves follow libtorch's order of nodes, which is that of the operators in a forward on one thread. A backward
// runs on the thread that calls it (on the CPU), and one StageBackward is used by one thread at a time. Those of several
// threads may have parameters in common.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>
#include <vector>

namespace penstock::internal {

// The tensors with which a stage's forward starts.
class StageInputs {
 public:
  // A tensor that is to have a gradient, and is of a dtype that can, enters as an alias of what was received, whose
  // history begins here: neither a leaf nor a view, so that the stage may write into it in place, and with a version
  // counter of its own. The others enter as aliases without history, and undefined ones as they are.
  StageInputs(const std::vector<at::Tensor>& received, const std::vector<bool>& needs_grad);
  ~StageInputs();

  StageInputs(StageInputs&&) noexcept;
  StageInputs& operator=(StageInputs&&) noexcept;
  StageInputs(const StageInputs&) = delete;
  StageInputs& operator=(const StageInputs&) = delete;

  const std::vector<at::Tensor>& tensors() const { return tensors_; }
  // The same, which are then the caller's alone: the memory of what no operator saves goes with them.
  std::vector<at::Tensor> take() { return std::exchange(tensors_, {}); }

 private:
  friend class StageBackward;
  struct Start;

  std::vector<at::Tensor> tensors_;
  std::unique_ptr<Start> start_;
};

// The graph of one forward. It holds no output, and no input but where an operator saved it; each half releases what
// only it needed while it runs, and destroying a StageBackward releases all that has not run.
class StageBackward {
 public:
  // Outputs that require no gradient, and undefined ones, keep their places. A loss is an output like any other; its
  // gradient is the seed.
  StageBackward(StageInputs inputs, const std::vector<at::Tensor>& outputs);
  ~StageBackward();

  StageBackward(StageBackward&&) noexcept;
  StageBackward& operator=(StageBackward&&) noexcept;
  StageBackward(const StageBackward&) = delete;
  StageBackward& operator=(const StageBackward&) = delete;

  // One more output, behind the others; before anything runs.
  void add_output(const at::Tensor& output);

  // Each takes a gradient for each output, undefined where none flows (ignored for one that requires none),
  // and returns one for each input, undefined where none arrived. A returned tensor may be one that was given, or share
  // its storage with another: it is not to be written to.
  //
  // There is either one full(), or one input_half() and then one weight_half(): anything else is a std::logic_error.
  // Gradients that do not fit are a std::invalid_argument, and nothing has run. One that fails later has run: its graph
  // is gone.
  std::vector<at::Tensor> full(std::vector<at::Tensor> output_gradients);
  std::vector<at::Tensor> input_half(std::vector<at::Tensor> output_gradients);
  void weight_half();

 private:
  struct Graph;
  struct Roots;

  // Of the outputs through which a gradient flows.
  Roots roots(const char* caller, std::vector<at::Tensor> gradients) const;

  // What has not run yet.
  std::unique_ptr<Graph> graph_;
};

}  // namespace penstock::internal
