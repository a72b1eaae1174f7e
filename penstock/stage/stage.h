// A PipelineStage is a part of a model: it takes what earlier stages give, or the arguments of the whole, and gives
// something to later ones, or the output of the whole; and back again with gradients.
//
//   PipelineStage stage({.forward = …, .parameters = …}, /*stage_index=*/1, /*num_stages=*/4);
//
// A Pipeline calls the rest. Messages are those of the stage's links (wiring.h), in their order.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "penstock/stage/module.h"
#include "penstock/stage/parameters.h"
#include "penstock/stage/saved_state.h"
#include "penstock/stage/wiring.h"
#include "penstock/tensor/metadata.h"
#include "penstock/tensor/microbatch.h"
#include "penstock/tensor/named_tensors.h"
#include "penstock/transport/transport.h"

namespace penstock {

struct StageOptions {
  at::Device device = at::kCPU;
  // What the stage's arguments and outputs are for one microbatch, none for None. They are checked for each microbatch,
  // strides aside, so they are for batches that split evenly.
  std::optional<std::vector<std::optional<TensorMeta>>> input_metadata = std::nullopt;
  std::optional<std::vector<std::optional<TensorMeta>>> output_metadata = std::nullopt;
  // Supplies the weight gradients of a module that leaves them out of its backward: called after each backward, it
  // gives the function that computes them, which is called in W, or at once in B.
  std::function<std::function<void()>()> dw_builder = nullptr;
};

class PipelineStage {
 public:
  // Throws StageError when there is no such stage.
  PipelineStage(StageModule module, int stage_index, int num_stages, StageOptions options = {});
  ~PipelineStage();
  PipelineStage(const PipelineStage&) = delete;
  PipelineStage& operator=(const PipelineStage&) = delete;
  PipelineStage(PipelineStage&&) noexcept;
  PipelineStage& operator=(PipelineStage&&) noexcept;

  int stage_index() const { return index_; }
  int num_stages() const { return stages_; }
  bool is_first() const { return index_ == 0; }
  bool is_last() const { return index_ == stages_ - 1; }
  const StageModule& module() const { return module_; }
  at::Device device() const { return options_.device; }

  // What an optimizer is to step: the module's parameters, or the shards that this stage keeps of them.
  const NamedTensors& parameters() const { return sync_ ? sync_->parameters() : module_.parameters; }
  // How its parameters are kept in step with those of replicas; none without them.
  void set_sync(std::unique_ptr<ParameterSync> sync) { sync_ = std::move(sync); }
  ParameterSync* sync() const { return sync_.get(); }

  // How the forwards of a step are used.
  enum class Mode {
    // Forwards alone.
    Evaluation,
    // Backwards too, by autograd: forwards keep what these need.
    Autograd,
    // Backwards too, by functions of the user's.
    UserBackward,
  };
  // Begins a step: whatever an earlier one has left is forgotten. Throws StageError: see AccumulatedGradients.
  void begin(const Wiring& wiring, int microbatches, Mode mode);
  // Adds all that the step may change, gradients and buffers, after begin(). `has_user_functions` says that functions of the
  // user's run in the step, which may write to gradients themselves.
  void save(SavedState& saved, bool has_user_functions) const;
  // After a step that succeeded.
  void end();
  // After a step that failed, when what was saved is restored: nothing of the step is left.
  void rollback();

  struct Forwarded {
    // For each link that leads away. A tensor that is to have a gradient requires grad, and no more: it is detached.
    std::vector<Message> sent;
    // What the module gave; of use on the last stage. Tensors have their history.
    c10::IValue output;
    // What was handed in by add_loss.
    std::vector<at::Tensor> losses;
  };
  // The forward of a microbatch: `received` for each link that leads here, `args` on the first stage, and keyword
  // arguments on any. Throws StageError and PipeliningShapeError, which name the stage, and what the module throws.
  Forwarded forward(int microbatch, std::vector<Message> received, const Args& args, const Kwargs& kwargs);

  // What the backward of a microbatch begins with, besides the gradients that come from later stages. Before the
  // backward.
  void add_root(int microbatch, const at::Tensor& loss, const at::Tensor& seed);

  // Returns a tensor that a forward gave without its history, for as long as the caller likes: copied if it lies in memory
  // that later microbatches may write into, that of parameters, buffers and arguments.
  at::Tensor kept(const at::Tensor& tensor, const Args& args, const Kwargs& kwargs) const;

  // The backward of a microbatch, whole or in halves: from a message of gradients for each link that leads away to one
  // for each link that leads here.
  std::vector<Message> full_backward(int microbatch, std::vector<Message> gradients);
  std::vector<Message> input_backward(int microbatch, std::vector<Message> gradients);
  void weight_backward(int microbatch);

  // Whether a microbatch still keeps something.
  bool keeps(int microbatch) const;

 private:
  struct Run;
  // A tensor that goes to another stage: where it is in this stage's graph, and what is sent.
  struct Handed {
    at::Tensor in_graph;
    at::Tensor sent;
  };

  // Where a value that came is among the tensors of all links.
  std::size_t position_of(const StageOutput& value, const Run& run) const;
  // What comes from an earlier stage and goes on to a later one: its place in the graph before this stage writes into
  // it, and the memory that it came in, `lent`. When that is the stage's own to write into, it is copied.
  std::vector<Handed> hand_on(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& lent,
                              const Run& run) const;
  // All that goes away, by link.
  std::vector<std::vector<Handed>> hand_over(const std::vector<at::Tensor>& outputs, std::vector<Handed> handed_on,
                                             const Args& args, const Kwargs& kwargs) const;
  // True if the tensor lies in memory of the stage or the caller, which others may write into.
  bool is_of_others(const at::Tensor& tensor, const Args& args, const Kwargs& kwargs) const;
  std::vector<Message> backward(int microbatch, std::vector<Message> gradients, bool whole);
  Run& run_of(int microbatch);

  StageModule module_;
  int index_;
  int stages_;
  StageOptions options_;
  // Of parameters and buffers.
  std::unordered_set<const void*> own_memory_;

  std::unique_ptr<ParameterSync> sync_;

  Mode mode_ = Mode::Evaluation;
  std::vector<Wiring::Link> links_in_;
  std::vector<Wiring::Link> links_out_;
  std::optional<std::vector<StageOutput>> arguments_;
  // By microbatch.
  std::vector<std::unique_ptr<Run>> runs_;
};

// Hands in a term of the loss from inside a stage's forward, such as that of a router that should use its experts
// evenly. It is weighted as the microbatch's loss is. Throws StageError outside of a stage's forward.
void add_loss(const at::Tensor& term);

}  // namespace penstock
