// A PipelineStage is one part of a model. Its forward takes outputs of earlier stages, or the arguments of the model,
// and returns tensors to later stages, or the output of the model; its backward returns gradients the other way.
//
//   PipelineStage stage({.forward = …, .parameters = …}, /*stage_index=*/1, /*num_stages=*/4);
//
// You construct stages and pass them to a Pipeline, which calls the rest.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "penstock/stage/module.h"
#include "penstock/stage/wiring.h"
#include "penstock/tensor/metadata.h"
#include "penstock/tensor/microbatch.h"
#include "penstock/transport/transport.h"

namespace penstock {

namespace internal {
class ParameterSync;
class SavedState;
}  // namespace internal

struct StageOptions {
  // Device on which the stage computes.
  at::Device device = at::kCPU;
  // Metadata of the stage's arguments and outputs for one microbatch, none for None. Every microbatch is checked
  // against it, except for strides, so the batch has to split evenly.
  std::optional<std::vector<std::optional<TensorMeta>>> input_metadata = std::nullopt;
  std::optional<std::vector<std::optional<TensorMeta>>> output_metadata = std::nullopt;
  // Supplies the weight gradients of a module that leaves them out of its backward. It is called after each backward,
  // and returns the function that computes them, which is called in W, or at once in B.
  std::function<std::function<void()>()> dw_builder = nullptr;
  // Makes each forward save its inputs only. It is recomputed when its backward begins, or before by an R of the
  // schedule. With such an option alone, the schedule and what is simulated from it do not know of the recomputation.
  bool recompute = false;
};

// A stage owns its module's function and references to its parameters and buffers. It is movable. During a step the
// thread of its rank is the only one to call it; between steps it may be called from any thread, one at a time.
//
// Messages (transport.h) are those of the stage's links, in the order of Wiring::links_to and links_from.
class PipelineStage {
 public:
  // Throws StageError when stage_index is not in [0, num_stages) or the module has no forward.
  PipelineStage(StageModule module, int stage_index, int num_stages, StageOptions options = {});
  ~PipelineStage();
  PipelineStage(const PipelineStage&) = delete;
  PipelineStage& operator=(const PipelineStage&) = delete;
  PipelineStage(PipelineStage&&) noexcept;
  PipelineStage& operator=(PipelineStage&&) noexcept;

  int stage_index() const;
  int num_stages() const;
  bool is_first() const { return stage_index() == 0; }
  bool is_last() const { return stage_index() == num_stages() - 1; }
  const StageModule& module() const;
  at::Device device() const;

  // Returns the parameters that an optimizer steps: the module's, or the shards of them that this stage keeps.
  const NamedTensors& parameters() const;

  // The rest is called by Pipeline.

  // Sets the object that synchronises the parameters with those of replicas. Without replicas there is none.
  void set_sync(std::unique_ptr<internal::ParameterSync> sync);
  // Returns that object, which the stage owns; null without replicas.
  internal::ParameterSync* sync() const;

  // The kind of backward that the forwards of a step prepare.
  enum class Mode {
    // There are no backwards.
    Evaluation,
    // Backwards run by autograd, for which forwards save what they need.
    Autograd,
    // Backwards run by functions of the user.
    UserBackward,
  };
  // Begins a step, and discards whatever an earlier one has left. Throws StageError when gradients that wait for a
  // reduction have been changed.
  void begin(const Wiring& wiring, int microbatches, Mode mode);
  // Adds everything that the step may change to `saved`: gradients and buffers. Called after begin().
  // `has_overrides` is true if functions of the user run in place of actions, and may write to gradients themselves.
  void save(internal::SavedState& saved, bool has_overrides) const;
  // Ends a step that succeeded.
  void end();
  // Ends a step that failed, after the saved state has been restored. Nothing of the step is left.
  void rollback();

  struct Forwarded {
    // A message for each outgoing link. Tensors are detached; those that are to get a gradient require grad.
    std::vector<Message> sent;
    // The output of the module, with its history. Used on the last stage.
    c10::IValue output;
    // The terms added by add_loss.
    std::vector<at::Tensor> losses;
  };
  // Runs the forward of a microbatch. `received` has a message for each incoming link, `args` are the arguments of the
  // first stage, and keyword arguments go to any stage. If it will be recomputed, also by StageOptions, it saves these
  // for the backward, and nothing else; the module must not write into `args` and `kwargs` then. Throws StageError and
  // PipeliningShapeError, which name the stage, and whatever the module throws.
  Forwarded forward(int microbatch, std::vector<Message> received, const Args& args, const Kwargs& kwargs,
                    bool will_be_recomputed = false);
  // Runs such a forward again, and saves what the backward needs. Without a call, the backward does it.
  void recompute(int microbatch);

  // Adds a loss from which the backward of a microbatch starts, besides the gradients that come from later stages.
  // `seed` is its gradient. Called before the backward.
  void add_root(int microbatch, const at::Tensor& loss, const at::Tensor& seed);

  // Returns a tensor of the forward's output without its history, which the caller may keep. It is copied if it lies in
  // memory that later microbatches may write to: that of parameters, buffers and arguments.
  at::Tensor detached(const at::Tensor& tensor, const Args& args, const Kwargs& kwargs) const;

  // Run the backward of a microbatch, whole or in halves. `gradients` has a message for each outgoing link; the result
  // has one for each incoming link.
  std::vector<Message> full_backward(int microbatch, std::vector<Message> gradients);
  std::vector<Message> input_backward(int microbatch, std::vector<Message> gradients);
  void weight_backward(int microbatch);

  // True if a microbatch has run its forward but not all of its backward, so that its activations are still saved.
  bool has_saved_activations(int microbatch) const;

 private:
  struct Impl;

  std::unique_ptr<Impl> impl_;
};

// Adds a term to the loss from inside a stage's forward, such as a router's load-balancing loss. It gets the weight of
// the microbatch's loss. Throws StageError outside of a stage's forward.
//
//   add_loss(0.01 * balance(router_probabilities));
void add_loss(const at::Tensor& term);

}  // namespace penstock
