#include "penstock/runtime/actions.h"

#include <cstddef>
#include <utility>

#include "penstock/runtime/executor.h"

namespace penstock {

const StepOptions& ActionContext::options() const {
  return *executor_->inputs_->options;
}
const Batch& ActionContext::microbatch(int index) const {
  return executor_->inputs_->microbatches.at(static_cast<std::size_t>(index));
}
bool ActionContext::has_backward() const {
  return executor_->inputs_->backward;
}
double ActionContext::loss_factor(int microbatch) const {
  return executor_->inputs_->weights.factors.at(static_cast<std::size_t>(microbatch));
}
void ActionContext::set_output(int microbatch, c10::IValue output) {
  executor_->outputs_->outputs.at(static_cast<std::size_t>(microbatch)) = std::move(output);
  executor_->outputs_->has_outputs = true;
}
void ActionContext::set_loss(int microbatch, at::Tensor loss) {
  executor_->outputs_->losses.at(static_cast<std::size_t>(microbatch)) = std::move(loss);
}
PipelineStage& ActionContext::stage(int index) {
  return *executor_->stages_.at(index);
}
std::vector<Message> ActionContext::take_activations(int stage, int microbatch) {
  return executor_->collect(stage, microbatch, Direction::Forward);
}
std::vector<Message> ActionContext::take_gradients(int stage, int microbatch) {
  return executor_->collect(stage, microbatch, Direction::Backward);
}
void ActionContext::give_activations(int stage, int microbatch, std::vector<Message> messages) {
  executor_->put(stage, microbatch, Direction::Forward, std::move(messages));
}
void ActionContext::give_gradients(int stage, int microbatch, std::vector<Message> messages) {
  executor_->put(stage, microbatch, Direction::Backward, std::move(messages));
}
void ActionContext::run(const Action& action) {
  executor_->run_default(action);
}

}  // namespace penstock
