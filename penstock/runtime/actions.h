// Functions of the user that run around the actions of a schedule, or in place of them.
//
//   PipelineOptions options{.loss = mse};
//   options.functions.overrides[Computation::Forward] = [](const Action& action, ActionContext& context) {
//     log(context.stage(action.stage));
//     context.run(action);                        // what would run without the override
//   };
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <map>
#include <vector>

#include "penstock/runtime/batch.h"
#include "penstock/runtime/step.h"
#include "penstock/schedule/action.h"
#include "penstock/stage/stage.h"
#include "penstock/transport/transport.h"

namespace penstock {

namespace internal {
class Executor;
}  // namespace internal

// Access of an override to the step: its inputs, its results, and the messages between stages. It is
// valid during the call that it is passed to, on the thread of the rank.
class ActionContext {
 public:
  // Options of the step. `number` is set, by the caller or by counting.
  const StepOptions& options() const;
  // Arguments and target of a microbatch. A process rank has only what its own stages need.
  const Batch& microbatch(int index) const;
  // Returns true in Pipeline::step, and false in Pipeline::eval.
  bool has_backward() const;
  // Factor of a microbatch's loss in the gradients.
  double loss_factor(int microbatch) const;
  // Sets what the step returns for a microbatch, in place of the output or the loss that the last stage computes.
  void set_output(int microbatch, c10::IValue output);
  void set_loss(int microbatch, at::Tensor loss);

  // Returns a stage of this rank. Throws std::out_of_range for a stage of another rank.
  PipelineStage& stage(int index);
  // Return the activations that were sent to a stage, one message for each edge that leads to it, and the gradients,
  // one message for each edge that leads away from it. They block until the messages arrive; each message is returned
  // once.
  std::vector<Message> take_activations(int stage, int microbatch);
  std::vector<Message> take_gradients(int stage, int microbatch);
  // Pass on the activations of a stage, one message for each edge that leads away from it, and the gradients, one
  // message for each edge that leads to it.
  void give_activations(int stage, int microbatch, std::vector<Message> messages);
  void give_gradients(int stage, int microbatch, std::vector<Message> messages);
  // Runs the action as it would run without an override. The parts of an OVERLAP_F_B run one after the other, each with
  // its own override if it has one.
  void run(const Action& action);

 private:
  friend class internal::Executor;
  explicit ActionContext(internal::Executor& executor) : executor_(&executor) {}

  internal::Executor* executor_;
};

using ActionFunction = std::function<void(const Action& action, ActionContext& context)>;

// Functions of the user. They are called on the threads of the ranks, possibly on several at once. What they throw
// fails the step.
struct ActionFunctions {
  // Functions that replace a computation or a message.
  std::map<Computation, ActionFunction> overrides = {};
  // Functions that are called before and after each action of each rank, to observe it. They must not write to
  // gradients: a rollback would not restore those.
  std::function<void(int rank, const Action& action)> before = nullptr;
  std::function<void(int rank, const Action& action)> after = nullptr;
};

}  // namespace penstock
