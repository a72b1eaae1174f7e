#include "penstock/stage/saved_state.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/equal.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "penstock/tensor/nested.h"

namespace penstock::internal {
namespace {

using torch::autograd::Node;

at::Tensor copy_of(const at::Tensor& tensor) {
  const c10::AutoGradMode no_grad(false);
  return tensor.detach().clone();
}

// Writes only where something has changed: a write counts for whoever has saved the tensor for a backward.
void overwrite(const at::Tensor& tensor, const at::Tensor& values) {
  const c10::InferenceMode mode(tensor.is_inference());
  const c10::AutoGradMode no_grad(false);
  if (tensor.layout() == at::kStrided) {
    // No operator writes into what overlaps itself.
    if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) return;
    if (at::equal(tensor, values)) return;
  }
  // Not into tensor.detach(): a sparse tensor has its memory to itself.
  tensor.copy_(values);
}

}  // namespace

void SavedState::add_gradient(const at::Tensor& tensor) {
  if (!with_gradient_.insert(tensor.unsafeGetTensorImpl()).second) return;
  const at::Tensor& gradient = tensor.mutable_grad();
  gradients_.push_back({tensor, gradient, gradient.defined() ? copy_of(gradient) : at::Tensor()});
}

void SavedState::add_gradients_behind(const c10::IValue& value) {
  std::vector<Node*> open;
  std::unordered_set<const Node*> seen;
  const auto enter = [&](Node* node) {
    if (node != nullptr && seen.insert(node).second) open.push_back(node);
  };
  // Holds the accumulators of leaves, which nobody else may.
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
    if (const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(node)) add_gradient(leaf->variable);
    for (const torch::autograd::Edge& edge : node->next_edges()) enter(edge.function.get());
  }
}

void SavedState::add_values(const at::Tensor& tensor) {
  if (!tensor.defined() || !with_values_.insert(tensor.unsafeGetTensorImpl()).second) return;
  values_.push_back({tensor, copy_of(tensor)});
}

void SavedState::restore() {
  for (Gradient& saved : gradients_) {
    if (saved.gradient.defined()) overwrite(saved.gradient, saved.values);
    saved.of.mutable_grad() = std::move(saved.gradient);
  }
  for (const Values& saved : values_) overwrite(saved.tensor, saved.values);
  clear();
}

void SavedState::clear() {
  gradients_.clear();
  values_.clear();
  with_gradient_.clear();
  with_values_.clear();
}

}  // namespace penstock::internal
