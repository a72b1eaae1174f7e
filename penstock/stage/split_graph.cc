#include "penstock/stage/split_graph.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <typeindex>
#include <typeinfo>
#include <utility>

namespace penstock::internal {
namespace {

using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

// Nodes of products. Each gradient has a formula of its own, which is as much work as the forward, and the formula of
// the second factor needs the first factor and the incoming gradient. All of them compute only the gradients that are
// needed. libtorch's other nodes do so too, but either compute several at once when one is needed (normalisations,
// attention, RNNs, cat, stack, prelu, …; none of these may run twice), or are so little work that saving their
// gradients is better than saving what these are computed from.
constexpr std::array<std::string_view, 10> kProducts = {
    "AddbmmBackward0", "AddmmBackward0",       "AddmvBackward0",  "BaddbmmBackward0", "BmmBackward0",
    "MmBackward0",     "ConvolutionBackward0", "LinearBackward0", "MvBackward0",      "TrilinearBackward0"};

// True if the node can be run once for its inputs and once for its parameters without computing anything twice. An
// unknown type (a custom function's, CopySlices, …) cannot.
bool is_product(const Node& node) {
  thread_local ska::flat_hash_map<std::type_index, bool> known;
  const std::type_info& type = typeid(node);
  const auto found = known.find(type);
  if (found != known.end()) return found->second;
  const bool generated = std::string_view(type.name()).starts_with("N5torch8autograd9generated");
  const bool result = generated && std::ranges::find(kProducts, node.name()) != kProducts.end();
  known.emplace(type, result);
  return result;
}

}  // namespace

BorderNode::BorderNode(NodePtr node, edge_list input_edges, edge_list weight_edges)
    : Node(node->sequence_nr(), std::move(input_edges)),
      node_(std::move(node)),
      weight_edges_(std::move(weight_edges)) {
  for (std::uint32_t i = 0; i < node_->num_inputs(); ++i) input_metadata_.push_back(node_->input_metadata(i));
  tensor_pre_hooks_ = std::move(node_->tensor_pre_hooks());
  retains_grad_hooks_ = std::move(node_->retains_grad_hooks());
  pre_hooks_ = std::move(node_->pre_hooks());
  // Post-hooks see the gradients of all children together, so the node runs once if it has any.
  runs_twice_ = is_product(*node_) && node_->post_hooks().empty();
  // The node finds from its own edges which gradients are needed.
  if (runs_twice_) node_->next_edges() = next_edges_;
}

void BorderNode::start_weight_half() {
  next_edges_ = std::move(weight_edges_);
  if (runs_twice_) {
    node_->next_edges() = next_edges_;
  } else {
    node_.reset();
  }
  tensor_pre_hooks_.clear();
  retains_grad_hooks_.clear();
  pre_hooks_.clear();
  is_weight_half_ = true;
}

void BorderNode::release() {
  if (node_) node_->release_variables();
  node_.reset();
}

variable_list BorderNode::apply(variable_list&& gradients) {
  if (!is_weight_half_ && runs_twice_) {
    saved_ = gradients;
    return (*node_)(std::move(gradients));
  }
  if (!is_weight_half_) return run_for_both(std::move(gradients));
  return runs_twice_ ? run_and_release(std::exchange(saved_, {})) : std::exchange(saved_, {});
}

variable_list BorderNode::run_and_release(variable_list gradients) {
  node_->will_release_variables();
  variable_list results = (*node_)(std::move(gradients));
  node_->release_variables();
  return results;
}

variable_list BorderNode::run_for_both(variable_list gradients) {
  variable_list results;
  if (node_->post_hooks().empty()) {
    results = run_and_release(std::move(gradients));
  } else {
    results = run_and_release(gradients);
    validate(node_->next_edges(), results);
    for (const auto& hook : node_->post_hooks()) results = (*hook)(results, gradients);
  }
  // The engine refuses a number of results that differs from the number of edges when it gets them.
  saved_.resize(weight_edges_.size());
  for (std::size_t i = 0; i < std::min(results.size(), saved_.size()); ++i) {
    if (weight_edges_[i].is_valid()) saved_[i] = std::exchange(results[i], {});
  }
  validate(weight_edges_, saved_);
  return results;
}

void BorderNode::validate(const edge_list& edges, variable_list& results) const {
  torch::autograd::validate_outputs(edges, results, [this](const std::string& problem) {
    return "Function " + node_->name() + " returned an " + problem;
  });
}

void GraphPartition::walk(Node* root) {
  enter(root);
  while (!path_.empty()) {
    PathNode& last = path_.back();
    if (last.next_edge < last.node->num_outputs()) {
      enter(last.node->next_edge(last.next_edge++).function.get());
    } else {
      Node* const node = last.node;
      path_.pop_back();
      assign(*node);
    }
  }
}

void GraphPartition::enter(Node* node) {
  if (node == nullptr) return;
  if (node->num_outputs() > 0) {
    if (halves_.emplace(node, kWeightHalf).second) path_.push_back({node, 0});
  } else if (const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(node)) {
    parameters_.push_back(leaf->variable);
  }
}

void GraphPartition::assign(Node& node) {
  to_input_.clear();
  bool leads_to_weight = false;
  for (Edge& edge : node.next_edges()) {
    to_input_.push_back(edge.is_valid() && redirect(edge));
    leads_to_weight = leads_to_weight || (edge.is_valid() && !to_input_.back());
  }
  if (std::ranges::find(to_input_, true) == to_input_.end()) return;
  halves_[&node] = leads_to_weight ? static_cast<std::int64_t>(borders_.size()) : kInputHalf;
  if (leads_to_weight) add_border(node);
}

void GraphPartition::add_border(Node& node) {
  edge_list input_edges(node.num_outputs());
  edge_list weight_edges(node.num_outputs());
  for (std::size_t i = 0; i < to_input_.size(); ++i) (to_input_[i] ? input_edges : weight_edges)[i] = node.next_edge(i);
  borders_.push_back(c10::make_intrusive<BorderNode>(node.getptr(), std::move(input_edges), std::move(weight_edges)));
}

bool GraphPartition::redirect(Edge& edge) const {
  if (edge.function.get() == inputs_) return true;
  const auto found = halves_.find(edge.function.get());
  if (found == halves_.end() || found->second == kWeightHalf) return false;
  if (found->second != kInputHalf) edge.function = borders_[static_cast<std::size_t>(found->second)];
  return true;
}

}  // namespace penstock::internal
