#include "penstock/stage/saved_state.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/add.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "penstock/base/mutex.h"
#include "penstock/stage/copy_on_write.h"
#include "penstock/tensor/nested.h"

namespace penstock::internal {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;
using torch::autograd::variable_list;

at::Tensor copy_of(const at::Tensor& tensor) {
  const c10::AutoGradMode no_grad(false);
  return tensor.detach().clone();
}

// Writes only where something has changed: a write invalidates the tensor for a backward that has saved it. A tensor on a
// device is always written to, as the host would have to wait for a comparison, and the device may never answer.
void overwrite(const at::Tensor& tensor, const at::Tensor& values) {
  const c10::InferenceMode mode(tensor.is_inference());
  const c10::AutoGradMode no_grad(false);
  if (tensor.layout() == at::kStrided) {
    // No operator writes into a tensor that overlaps itself.
    if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) return;
    if (tensor.is_cpu() && at::equal(tensor, values)) return;
  }
  // Not into tensor.detach(), which does not share the values of a sparse tensor.
  tensor.copy_(values);
}

// Returns the number of references to the storage that come from the tensor itself. A view keeps its base alive, as the
// gradient of a linear layer's weight does, which is computed transposed; nobody else can reach that base.
std::size_t own_references(const at::Tensor& tensor) {
  return tensor.is_view() && tensor._base().use_count() == 1 ? 2 : 1;
}

// True if the tensor is plain and covers exactly a storage that libtorch has allocated and nothing else refers to.
// Memory from elsewhere (from_blob, NumPy, a mapped file) can be observed by its owner.
bool covers_own_storage(const at::Tensor& tensor) {
  return is_plain(tensor) && tensor.is_non_overlapping_and_dense() &&
         tensor.storage().use_count() <= own_references(tensor) && tensor.storage().resizable() &&
         tensor.storage().nbytes() == tensor.nbytes();
}

}  // namespace

// One .grad. AccumulationHook calls save_before() on the threads of backwards, under mutex_; everything else runs while
// there is no backward.
class SavedState::Gradient {
 public:
  explicit Gradient(const at::Tensor& tensor) : tensor_(tensor), gradient_(tensor.mutable_grad()) {}
  ~Gradient() { remove_hook(); }
  Gradient(const Gradient&) = delete;
  Gradient& operator=(const Gradient&) = delete;

  void save_values() {
    const MutexLock lock(mutex_);
    copy_values();
  }

  // Saves when autograd first adds to the gradient; at once if autograd does not add to such a tensor.
  void save_on_first_addition();

  // More than one thread may add to the gradient.
  void set_shared() { is_shared_ = true; }

  // Called before `accumulator` adds `incoming` to .grad. Returns what is left for it to add.
  at::Tensor save_before(AccumulateGrad& accumulator, const at::Tensor& incoming, bool is_last_hook) {
    // Held during the addition too, so that no other thread adds before .grad has been replaced.
    const MutexLock lock(mutex_);
    if (is_saved_ || !accumulator.variable.requires_grad()) return incoming;
    // Somebody has replaced .grad, so this gradient stays as it is.
    if (!accumulator.variable.grad().is_same(gradient_)) return incoming;
    const bool is_observed = is_shared_ || !is_last_hook || !accumulator.post_hooks().empty() ||
                             accumulator.tensor_post_acc_grad_hooks() != nullptr;
    if (is_observed || !can_replace_by_sum_with(incoming)) {
      copy_values();
      return incoming;
    }
    accumulator.variable.mutable_grad() = sum_with(incoming);
    is_saved_ = true;
    return {};
  }

  void restore() {
    remove_hook();
    const MutexLock lock(mutex_);
    if (values_.defined()) overwrite(gradient_, values_);
    tensor_.mutable_grad() = std::move(gradient_);
  }

 private:
  void copy_values() PENSTOCK_REQUIRES(mutex_) {
    if (!is_saved_ && gradient_.defined()) values_ = copy_of(gradient_);
    is_saved_ = true;
  }

  // True if nobody can tell whether the sum is formed in place: nothing refers to the gradient but .grad and this.
  bool can_replace_by_sum_with(const at::Tensor& incoming) const {
    return !c10::GradMode::is_enabled() && torch::autograd::impl::is_tensor_stealable(gradient_, 2) &&
           covers_own_storage(gradient_) && is_plain(incoming) && incoming.sizes() == gradient_.sizes() &&
           incoming.scalar_type() == gradient_.scalar_type() && incoming.device() == gradient_.device() &&
           !incoming.requires_grad() && !gradient_.requires_grad() && !incoming.is_inference() &&
           !gradient_.is_inference() && !gradient_.is_conj() && !gradient_.is_neg();
  }

  // Returns gradient + incoming, in this order, in the memory of `incoming` if nothing else refers to it.
  at::Tensor sum_with(const at::Tensor& incoming) const {
    const bool is_free = torch::autograd::impl::is_tensor_stealable(incoming) && covers_own_storage(incoming) &&
                         incoming.strides() == gradient_.strides() && !incoming.is_conj() && !incoming.is_neg();
    at::Tensor sum = is_free ? incoming.detach() : at::empty_like(gradient_);
    return at::add_out(sum, gradient_, incoming);
  }

  void remove_hook();

  at::Tensor tensor_;
  // .grad from before the step; undefined if there was none.
  at::Tensor gradient_;
  bool is_shared_ = false;
  // The accumulator of tensor_, which would otherwise live only as long as a graph; it owns hook_.
  c10::intrusive_ptr<Node> accumulator_;
  const AccumulationHook* hook_ = nullptr;

  Mutex mutex_;
  // True when gradient_ or values_ keeps the values from before the step, whatever is added from now on.
  bool is_saved_ PENSTOCK_GUARDED_BY(mutex_) = false;
  // Copy of the values of gradient_, if it changes in place.
  at::Tensor values_ PENSTOCK_GUARDED_BY(mutex_);
};

// Runs on an AccumulateGrad node before it adds to .grad. Hooks on the tensor have run before it.
class SavedState::AccumulationHook final : public torch::autograd::FunctionPreHook {
 public:
  // The node owns this hook; `gradient` removes it before it is destroyed itself.
  AccumulationHook(AccumulateGrad& node, Gradient& gradient) : node_(node), gradient_(gradient) {}

  variable_list operator()(const variable_list& gradients) override {
    if (!gradients[0].defined()) return gradients;
    return {gradient_.save_before(node_, gradients[0], /*is_last_hook=*/node_.pre_hooks().back().get() == this)};
  }

 private:
  AccumulateGrad& node_;
  Gradient& gradient_;
};

void SavedState::Gradient::save_on_first_addition() {
  if (!gradient_.defined()) return;
  // A gradient that others refer to changes in place, perhaps also by the gradient of another parameter.
  const bool is_exclusive = covers_own_storage(gradient_) && gradient_.use_count() <= 2;
  if (!is_exclusive || !tensor_.is_leaf() || !tensor_.requires_grad()) {
    save_values();
    return;
  }
  accumulator_ = torch::autograd::impl::grad_accumulator(tensor_);
  auto* const node = dynamic_cast<AccumulateGrad*>(accumulator_.get());
  if (node == nullptr) {
    save_values();
    return;
  }
  auto hook = std::make_unique<AccumulationHook>(*node, *this);
  hook_ = hook.get();
  node->add_pre_hook(std::move(hook));
}

void SavedState::Gradient::remove_hook() {
  if (hook_ == nullptr) return;
  std::erase_if(accumulator_->pre_hooks(), [this](const auto& hook) { return hook.get() == hook_; });
  hook_ = nullptr;
  accumulator_.reset();
}

SavedState::SavedState() = default;
SavedState::~SavedState() = default;
SavedState::SavedState(SavedState&&) noexcept = default;
SavedState& SavedState::operator=(SavedState&&) noexcept = default;

void SavedState::add_gradient(const at::Tensor& tensor) {
  Gradient*& gradient = gradient_of_[tensor.unsafeGetTensorImpl()];
  if (gradient == nullptr) gradient = gradients_.emplace_back(std::make_unique<Gradient>(tensor)).get();
  gradient->save_values();
}

void SavedState::add_accumulated_gradient(const at::Tensor& parameter) {
  Gradient*& gradient = gradient_of_[parameter.unsafeGetTensorImpl()];
  if (gradient != nullptr) {
    gradient->set_shared();
    return;
  }
  gradient = gradients_.emplace_back(std::make_unique<Gradient>(parameter)).get();
  gradient->save_on_first_addition();
}

void SavedState::add_gradients_behind(const c10::IValue& value) {
  std::vector<Node*> open;
  std::unordered_set<const Node*> seen;
  const auto enter = [&](Node* node) {
    if (node != nullptr && seen.insert(node).second) open.push_back(node);
  };
  // Keeps the accumulators of leaves alive, which nothing else may refer to.
  std::vector<torch::autograd::Edge> edges;
  for_each_leaf(value, Path(""), [&](const c10::IValue& leaf, const Path&) {
    if (!leaf.isTensor() || !leaf.toTensor().defined() || !leaf.toTensor().requires_grad()) return;
    add_gradient(leaf.toTensor());
    if (!leaf.toTensor().is_leaf()) edges.push_back(torch::autograd::impl::gradient_edge(leaf.toTensor()));
  });
  for (const torch::autograd::Edge& edge : edges) enter(edge.function.get());
  while (!open.empty()) {
    Node* const node = open.back();
    open.pop_back();
    if (const auto* leaf = dynamic_cast<const AccumulateGrad*>(node)) add_gradient(leaf->variable);
    for (const torch::autograd::Edge& edge : node->next_edges()) enter(edge.function.get());
  }
}

void SavedState::add_values(const at::Tensor& tensor) {
  if (!tensor.defined() || !with_values_.insert(tensor.unsafeGetTensorImpl()).second) return;
  values_.push_back({tensor, copy_of(tensor)});
}

void SavedState::restore() {
  for (const std::unique_ptr<Gradient>& gradient : gradients_) gradient->restore();
  for (const Values& saved : values_) overwrite(saved.tensor, saved.values);
  clear();
}

void SavedState::clear() {
  gradients_.clear();
  values_.clear();
  gradient_of_.clear();
  with_values_.clear();
}

}  // namespace penstock::internal
