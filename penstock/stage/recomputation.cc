#include "penstock/stage/recomputation.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <iterator>
#include <mutex>
#include <string>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/device/transfer.h"
#include "penstock/stage/backward.h"
#include "penstock/stage/checkpoint.h"
#include "penstock/stage/copy_on_write.h"
#include "penstock/stage/loss_terms.h"
#include "penstock/stage/wiring.h"
#include "penstock/tensor/identity.h"
#include "penstock/tensor/nested.h"

namespace penstock::internal {
namespace {

std::atomic<std::int64_t> made = 0;
std::atomic<std::int64_t> recomputed = 0;

// True within a part, in its forward and when it is computed again.
thread_local bool is_in_part = false;
thread_local std::shared_ptr<StageHistory> current_history;

constexpr const char* kBackwardWithin =
    "a part of a forward that is recomputed runs a backward itself.\n  Hint: recompute the parts around it.";

// Returns no sizes for a nested tensor, whose rows differ.
std::vector<std::int64_t> sizes_of(const at::Tensor& tensor) {
  return tensor.is_nested() ? std::vector<std::int64_t>() : tensor.sizes().vec();
}

// Returns the state of a device's default generator, and sets another one if it is defined.
at::Tensor exchange_default_random(at::Device device, const at::Tensor& state) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard lock(generator.mutex());
  at::Tensor before = generator.get_state();
  if (state.defined()) generator.set_state(state);
  return before;
}

// Returns the states of the default generators of the CPU and of the devices of the tensors.
std::vector<DefaultRandom> default_random(const std::vector<at::Tensor>& tensors) {
  std::vector<DefaultRandom> states{{at::kCPU, exchange_default_random(at::kCPU, {})}};
  for (const at::Device device : devices_of(tensors)) states.push_back({device, exchange_default_random(device, {})});
  return states;
}

// Gives the default generators their states while it lives.
class DefaultRandomScope {
 public:
  explicit DefaultRandomScope(const std::vector<DefaultRandom>& states) {
    for (const auto& [device, state] : states) before_.push_back({device, exchange_default_random(device, state)});
  }
  ~DefaultRandomScope() {
    for (const auto& [device, state] : before_) exchange_default_random(device, state);
  }
  DefaultRandomScope(const DefaultRandomScope&) = delete;
  DefaultRandomScope& operator=(const DefaultRandomScope&) = delete;

 private:
  std::vector<DefaultRandom> before_;
};

// True for a parameter, also one that is a view (of a flat buffer), and for a view of a parameter.
bool is_parameter(const at::Tensor& tensor) {
  const auto is_leaf = [](const at::TensorBase& candidate) { return candidate.is_leaf() && candidate.requires_grad(); };
  return is_leaf(tensor) || (tensor.is_view() && is_leaf(tensor._base()));
}

// Arguments of the caller, whose tensors can be kept apart.
struct CallerArguments {
  Args args;
  Kwargs kwargs;

  // Removes the tensors, and returns them in order.
  std::vector<at::Tensor> take_tensors() {
    std::vector<at::Tensor> tensors;
    const at::Tensor* none = nullptr;
    const auto take = [&](c10::IValue& value) {
      std::ranges::move(extract_tensor_args(value), std::back_inserter(tensors));
      replace_tensors(value, none);
    };
    for (c10::IValue& arg : args) take(arg);
    for (auto& [name, value] : kwargs) take(value);
    return tensors;
  }
  // Returns the arguments with these in place of the tensors that were removed.
  CallerArguments with_tensors(const at::Tensor* next) const {
    CallerArguments result = *this;
    for (c10::IValue& arg : result.args) replace_tensors(arg, next);
    for (auto& [name, value] : result.kwargs) replace_tensors(value, next);
    return result;
  }
};

}  // namespace

RecomputationCounts recomputation_counts() {
  return {.made = made, .recomputed = recomputed};
}

// Hooks of a tensor that is saved in the forward: forget it, and have it computed again.
class Recomputation::DroppingHooks final : public torch::autograd::SavedVariableHooks {
 public:
  explicit DroppingHooks(std::shared_ptr<Recomputation> recomputation)
      : recomputation_(std::move(recomputation)), index_(recomputation_->saved_.size()) {
    recomputation_->saved_.emplace_back();
  }
  ~DroppingHooks() override {
    Saved& saved = recomputation_->saved_[index_];
    saved.is_released = true;
    saved.tensor.reset();
  }
  DroppingHooks(const DroppingHooks&) = delete;
  DroppingHooks& operator=(const DroppingHooks&) = delete;

  void call_pack_hook(const at::Tensor& tensor) override {
    Saved& saved = recomputation_->saved_[index_];
    saved.sizes = sizes_of(tensor);
    saved.dtype = tensor.scalar_type();
    if (is_parameter(tensor)) saved.parameter_version = version_of(tensor);
  }
  at::Tensor call_unpack_hook() override { return recomputation_->saved_tensor(index_); }

 private:
  std::shared_ptr<Recomputation> recomputation_;
  std::size_t index_;
};

// Hooks of the same tensor when the part is computed again: keep it for the node of the forward.
class Recomputation::CapturingHooks final : public torch::autograd::SavedVariableHooks {
 public:
  CapturingHooks(Recomputation& recomputation, std::size_t index)
      : recomputation_(recomputation.shared_from_this()), index_(index) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    if (index_ >= recomputation_->saved_.size()) return;
    Saved& saved = recomputation_->saved_[index_];
    const std::vector<std::int64_t> sizes = sizes_of(tensor);
    if (sizes != saved.sizes || tensor.scalar_type() != saved.dtype) {
      throw StageError(concat("a part of a forward saved ", c10::toString(saved.dtype), shape_text(saved.sizes),
                              " as its tensor ", index_, ", and ", c10::toString(tensor.scalar_type()),
                              shape_text(sizes),
                              " when it was computed again.\n  Hint: its result should depend on its inputs alone."));
    }
    // The values that a buffer has now are those of the forward, and go when the recomputation ends.
    const bool is_restored = recomputation_->restores_buffers() && recomputation_->history_->writes_to(tensor);
    const bool was_modified =
        saved.parameter_version && is_parameter(tensor) && version_of(tensor) != *saved.parameter_version;
    if (was_modified && !is_restored) {
      throw StageError(
          concat("a parameter of shape ", shape_text(saved.sizes),
                 " was modified between a forward and its recomputation.\n  Hint: step the optimizer after "
                 "the backwards."));
    }
    if (saved.is_released) return;
    saved.tensor = is_restored ? tensor.detach().clone() : tensor.detach();
    saved.version = version_of(saved.tensor);
  }
  at::Tensor call_unpack_hook() override { throw StageError(kBackwardWithin); }

 private:
  std::shared_ptr<Recomputation> recomputation_;
  std::size_t index_;
};

Recomputation::Recomputation(const std::vector<at::Tensor>& inputs, std::shared_ptr<StageHistory> history,
                             const RecomputedPartOptions& options)
    : options_(options), random_(RandomScope::position()), history_(std::move(history)) {
  for (const at::Tensor& input : inputs) {
    inputs_.push_back(input.defined() ? input.detach() : at::Tensor());
    needs_grad_.push_back(input.defined() && input.requires_grad());
    versions_.push_back(version_of(input));
  }
  if (!random_) default_random_ = default_random(inputs);
  if (history_ != nullptr) before_ = history_->now(options_.writes_buffers);
}

void Recomputation::require_unwritten_inputs(const char* when) const {
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    if (version_of(inputs_[i]) == versions_[i]) continue;
    throw StageError(concat("input ", i, " of a part of a forward that is recomputed was written to ", when,
                            ".\n  Hint: let the part write into a clone of it."));
  }
}

const at::Tensor& Recomputation::saved_tensor(std::size_t index) {
  run();
  const Saved& saved = saved_[index];
  if (version_of(saved.tensor) == saved.version) return saved.tensor;
  throw StageError(concat("a tensor of shape ", shape_text(saved.sizes),
                          " that a backward needs was modified in place after it had been computed again."));
}

void Recomputation::run() {
  switch (state_) {
    case State::Done: return;
    case State::Expired: throw StageError("a part of a forward cannot be computed again after its step.");
    case State::Failed:
      throw StageError("the forward of a part that is recomputed has failed, so nothing has a backward through it.");
    case State::Forward:
    case State::Computing: throw StageError(kBackwardWithin);
    case State::Ready: break;
  }
  require_unwritten_inputs("before it was computed again");
  if (!random_ && RandomScope::is_open()) {
    throw StageError(
        "a part whose forward was in no RandomScope is computed again within one.\n  Hint: run the backward outside of "
        "it, or the forward in it.");
  }
  if (history_ != nullptr) history_->require_same_parameters(before_);
  if (!saved_.empty()) {
    state_ = State::Computing;
    try {
      compute();
    } catch (...) {
      for (Saved& saved : saved_) saved.tensor.reset();
      state_ = State::Ready;
      throw;
    }
    ++recomputed;
  }
  state_ = State::Done;
  release();
}

void Recomputation::expire() {
  if (state_ != State::Done) state_ = State::Expired;
  release();
}

void Recomputation::release() {
  inputs_.clear();
  function_ = nullptr;
  before_ = {};
}

class Recomputation::ForwardState {
 public:
  explicit ForwardState(const Recomputation& part) : autocast_(part.autocast_) {
    if (part.restores_buffers()) buffers_.emplace(*part.history_, part.before_);
    if (part.random_) {
      random_.emplace(*part.random_);
    } else {
      default_random_.emplace(part.default_random_);
    }
    is_in_part = true;
  }
  ~ForwardState() { is_in_part = was_in_part_; }
  ForwardState(const ForwardState&) = delete;
  ForwardState& operator=(const ForwardState&) = delete;

 private:
  c10::AutoGradMode grad_mode_{true};
  bool was_in_part_ = is_in_part;
  AutocastState::Scope autocast_;
  std::optional<MomentScope> buffers_;
  std::optional<RandomScope> random_;
  std::optional<DefaultRandomScope> default_random_;
};

void Recomputation::compute() {
  const ForwardState state(*this);
  std::vector<at::Tensor> terms;
  const LossTermScope ignored_terms(terms);

  std::vector<at::Tensor> arguments;
  // Where this is not the only reference to a tensor, what the function writes into becomes a copy: after a failure, it
  // is called again.
  const std::vector<at::Tensor> kept = inputs_;
  for (const at::Tensor& input : kept) {
    const bool needs_alias =
        options_.writes_arguments && input.defined() && is_plain(input) && !is_copy_on_write_alias(input);
    arguments.push_back(needs_alias ? copy_on_write_alias(input) : input);
  }
  StageInputs inputs(arguments, needs_grad_);
  arguments.clear();
  std::size_t next = 0;
  {
    const SavedTensorHooksScope hooks([&] { return std::make_unique<CapturingHooks>(*this, next++); });
    function_(inputs.take());
  }
  if (next == saved_.size()) return;
  throw StageError(concat("a part of a forward saved ", saved_.size(), " tensors, and ", next,
                          " when it was computed again.\n  Hint: its result should depend on its inputs alone."));
}

RecomputedPartScope::RecomputedPartScope(const std::vector<at::Tensor>& inputs, const RecomputedPartOptions& options)
    : recomputation_(std::make_shared<Recomputation>(inputs, current_history, options)) {
  hooks_.emplace(
      [recomputation = recomputation_] { return std::make_unique<Recomputation::DroppingHooks>(recomputation); });
  is_in_part = true;
}

RecomputedPartScope::~RecomputedPartScope() {
  if (!hooks_) return;
  is_in_part = false;
  recomputation_->state_ = Recomputation::State::Failed;
  recomputation_->release();
}

std::shared_ptr<Recomputation> RecomputedPartScope::close(RecomputedFunction function) {
  recomputation_->require_unwritten_inputs("by its forward");
  hooks_.reset();
  is_in_part = false;
  recomputation_->function_ = std::move(function);
  recomputation_->state_ = Recomputation::State::Ready;
  if (!recomputation_->saved_.empty()) ++made;
  return std::move(recomputation_);
}

bool RecomputedPartScope::is_open() {
  return is_in_part;
}

bool RecomputedPartScope::is_useful() {
  return c10::GradMode::is_enabled() && !is_in_part;
}

StageHistoryScope::StageHistoryScope(std::shared_ptr<StageHistory> history)
    : outer_(std::exchange(current_history, std::move(history))) {}

StageHistoryScope::~StageHistoryScope() {
  current_history = std::move(outer_);
}

RecomputedForward forward_for_recomputation(const StageModule& module, const Args& arguments,
                                            const std::vector<at::Tensor>& received, const Args& args,
                                            const Kwargs& kwargs, MakeArguments make_arguments) {
  // The inputs: what was received, then the tensors of the caller's arguments.
  std::vector<at::Tensor> inputs = received;
  CallerArguments given{args, kwargs};
  std::ranges::move(given.take_tensors(), std::back_inserter(inputs));
  RecomputedPartScope scope(inputs, {.writes_arguments = true});
  RecomputedForward result{.output = module.forward(arguments, kwargs), .recomputation = nullptr};
  result.recomputation = scope.close([&module, given = std::move(given), make_arguments = std::move(make_arguments),
                                      count = received.size()](const std::vector<at::Tensor>& inputs_again) {
    const auto end_of_received = inputs_again.begin() + static_cast<std::ptrdiff_t>(count);
    const CallerArguments caller = given.with_tensors(inputs_again.data() + count);
    module.forward(make_arguments({inputs_again.begin(), end_of_received}, caller.args), caller.kwargs);
  });
  return result;
}

}  // namespace penstock::internal
