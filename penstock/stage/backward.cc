#include "penstock/stage/backward.h"

#include <ATen/EmptyTensor.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <typeindex>
#include <typeinfo>
#include <unordered_set>
#include <utility>

namespace penstock::internal {
namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;
using NodePtr = c10::intrusive_ptr<Node>;

// Where the gradients of a stage's inputs end: it has no children, and keeps what arrives.
class InputNode final : public Node {
 public:
  std::string name() const override { return "PenstockStageInputs"; }

  variable_list apply(variable_list&& gradients) override {
    gradients_ = std::move(gradients);
    return {};
  }

  // One for each input, undefined where none arrived.
  variable_list take() {
    gradients_.resize(num_inputs());
    return std::exchange(gradients_, {});
  }

 private:
  variable_list gradients_;
};

// Where a run of the engine starts. Unlike libtorch's own node for it, it lets go of the gradients when it hands them
// out, and some may be undefined.
class RootNode final : public Node {
 public:
  // It is run by giving it `signal`. The gradients are listed as inputs too, so that the engine knows their devices.
  RootNode(const at::Tensor& signal, edge_list edges, variable_list gradients)
      : Node(std::move(edges)), gradients_(std::move(gradients)) {
    add_input_metadata(signal);
    for (const at::Tensor& gradient : gradients_) {
      if (gradient.defined()) add_input_metadata(gradient);
    }
  }

  std::string name() const override { return "PenstockRoots"; }

  // NOLINTNEXTLINE(cppcoreguidelines-rvalue-reference-param-not-moved): the signal says nothing
  variable_list apply(variable_list&& /*signal*/) override { return std::exchange(gradients_, {}); }

 private:
  variable_list gradients_;
};

// The products: each gradient has a formula of its own, which is as much work as the forward, and the formula of the
// second factor needs the first factor and the gradient that arrives. All of them ask which gradients are due. The
// others of libtorch's nodes do so too, but either compute several at once when one is due (normalisations, attention,
// RNNs, cat, stack, prelu, …; none of these must run twice), or are so little work that it is better to keep their
// gradients than what these are computed from.
constexpr std::array<std::string_view, 10> kProducts = {
    "AddbmmBackward0", "AddmmBackward0",       "AddmvBackward0",  "BaddbmmBackward0", "BmmBackward0",
    "MmBackward0",     "ConvolutionBackward0", "LinearBackward0", "MvBackward0",      "TrilinearBackward0"};

// Whether the node can be run once for its inputs and once for its parameters, without doing anything twice. A type
// that is not known (a custom function's, CopySlices, …) cannot.
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

// Stands in the graph for a node which leads both to an input and to a parameter: in the first half with the edges
// towards the inputs, in the second with the others. It has the node's sequence number, by which the engine orders
// nodes: sums of gradients are formed in the order of a whole backward.
class BorderNode final : public Node {
 public:
  // `inward` and `outward` are the node's edges towards the inputs and the others, each at its index.
  BorderNode(NodePtr node, edge_list inward, edge_list outward)
      : Node(node->sequence_nr(), std::move(inward)), node_(std::move(node)), outward_(std::move(outward)) {
    for (std::uint32_t i = 0; i < node_->num_inputs(); ++i) input_metadata_.push_back(node_->input_metadata(i));
    tensor_pre_hooks_ = std::move(node_->tensor_pre_hooks());
    retains_grad_hooks_ = std::move(node_->retains_grad_hooks());
    pre_hooks_ = std::move(node_->pre_hooks());
    // Hooks after a node see the gradients of all its children, so with one they must be there together.
    runs_twice_ = is_product(*node_) && node_->post_hooks().empty();
    // The node looks at its own edges to see which gradients are due.
    if (runs_twice_) node_->next_edges() = next_edges_;
  }

  std::string name() const override { return "PenstockBorder"; }

  // Between the halves. The hooks before the node have been called.
  void turn() {
    next_edges_ = std::move(outward_);
    if (runs_twice_) {
      node_->next_edges() = next_edges_;
    } else {
      node_.reset();
    }
    tensor_pre_hooks_.clear();
    retains_grad_hooks_.clear();
    pre_hooks_.clear();
    turned_ = true;
  }

  // For good.
  void release() {
    if (node_) node_->release_variables();
    node_.reset();
  }

  variable_list apply(variable_list&& gradients) override {
    if (!turned_ && runs_twice_) {
      kept_ = gradients;
      return (*node_)(std::move(gradients));
    }
    if (!turned_) return run_for_both(std::move(gradients));
    return runs_twice_ ? run_last(std::exchange(kept_, {})) : std::exchange(kept_, {});
  }

 private:
  variable_list run_last(variable_list gradients) {
    node_->will_release_variables();
    variable_list results = (*node_)(std::move(gradients));
    node_->release_variables();
    return results;
  }

  variable_list run_for_both(variable_list gradients) {
    variable_list results;
    if (node_->post_hooks().empty()) {
      results = run_last(std::move(gradients));
    } else {
      results = run_last(gradients);
      bring_into_form(node_->next_edges(), results);
      for (const auto& hook : node_->post_hooks()) results = (*hook)(results, gradients);
    }
    // The engine refuses another number of results than there are edges, when it gets them.
    kept_.resize(outward_.size());
    for (std::size_t i = 0; i < std::min(results.size(), kept_.size()); ++i) {
      if (outward_[i].is_valid()) kept_[i] = std::exchange(results[i], {});
    }
    bring_into_form(outward_, kept_);
    return results;
  }

  // What the engine does with results, and would do in the second half only: above all, it sums what was broadcast, so
  // that less is kept.
  void bring_into_form(const edge_list& edges, variable_list& results) const {
    torch::autograd::validate_outputs(edges, results, [this](const std::string& what) {
      return "Function " + node_->name() + " returned an " + what;
    });
  }

  NodePtr node_;
  edge_list outward_;
  // What arrived, of a node that runs twice; what leaves by the outward edges, of one that does not.
  variable_list kept_;
  bool runs_twice_ = false;
  bool turned_ = false;
};

using BorderPtr = c10::intrusive_ptr<BorderNode>;

// Finds the nodes that lead to a stage's inputs, and puts a BorderNode in the place of each of them that leads to a
// parameter too; notes the parameters on the way, some several times. A graph can be deep, so there is no recursion.
class Division {
 public:
  // Without inputs nothing leads to them, and the graph stays as it is.
  Division(const Node* inputs, std::vector<BorderPtr>& borders, variable_list& parameters)
      : inputs_(inputs), borders_(borders), parameters_(parameters) {}

  // Whether the root leads to an input; then it may be moved to a border.
  bool leads_inward(Edge& root) {
    walk(root.function.get());
    return redirect(root);
  }

 private:
  static constexpr std::int64_t kOutward = -2;
  static constexpr std::int64_t kInward = -1;

  struct Step {
    Node* node;
    std::size_t next_edge;
  };

  void walk(Node* root) {
    enter(root);
    while (!way_.empty()) {
      Step& step = way_.back();
      if (step.next_edge < step.node->num_outputs()) {
        enter(step.node->next_edge(step.next_edge++).function.get());
      } else {
        Node* node = step.node;
        way_.pop_back();
        divide(*node);
      }
    }
  }

  void enter(Node* node) {
    if (node == nullptr) return;
    if (node->num_outputs() > 0) {
      if (places_.emplace(node, kOutward).second) way_.push_back({node, 0});
    } else if (const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(node)) {
      parameters_.push_back(leaf->variable);
    }
  }

  // Its children have been divided.
  void divide(Node& node) {
    inward_.clear();
    bool outward = false;
    for (Edge& edge : node.next_edges()) {
      inward_.push_back(edge.is_valid() && redirect(edge));
      outward = outward || (edge.is_valid() && !inward_.back());
    }
    if (std::ranges::find(inward_, true) == inward_.end()) return;
    places_[&node] = outward ? static_cast<std::int64_t>(borders_.size()) : kInward;
    if (outward) add_border(node);
  }

  void add_border(Node& node) {
    edge_list to_inputs(node.num_outputs());
    edge_list to_parameters(node.num_outputs());
    for (std::size_t i = 0; i < inward_.size(); ++i) (inward_[i] ? to_inputs : to_parameters)[i] = node.next_edge(i);
    borders_.push_back(c10::make_intrusive<BorderNode>(node.getptr(), std::move(to_inputs), std::move(to_parameters)));
  }

  // Whether the edge leads to an input; then it is moved to the border that stands for its node, if one does.
  bool redirect(Edge& edge) const {
    if (edge.function.get() == inputs_) return true;
    const auto found = places_.find(edge.function.get());
    if (found == places_.end() || found->second == kOutward) return false;
    if (found->second != kInward) edge.function = borders_[static_cast<std::size_t>(found->second)];
    return true;
  }

  const Node* inputs_;
  // For each node that has children: kOutward, kInward, or the index of its border.
  ska::flat_hash_map<const Node*, std::int64_t> places_;
  std::vector<BorderPtr>& borders_;
  variable_list& parameters_;
  std::vector<Step> way_;
  std::vector<bool> inward_;
};

// Backwards on several threads may have parameters in common. Autograd lets one add to a gradient at a time, but whoever
// gives a parameter its first has it alone, until nobody else holds what has become its .grad.
class FirstGradients {
 public:
  // Waits for others that give one of these parameters its first gradient.
  explicit FirstGradients(const variable_list& parameters) {
    std::unique_lock lock(others().mutex);
    others().changed.wait(lock, [&] {
      return others().busy.empty() || std::ranges::none_of(parameters, [](const at::Tensor& parameter) {
               return others().busy.contains(parameter.unsafeGetTensorImpl());
             });
    });
    for (const at::Tensor& parameter : parameters) {
      if (parameter.grad().defined()) continue;
      parameters_.push_back(parameter);
      others().busy.insert(parameter.unsafeGetTensorImpl());
    }
  }
  ~FirstGradients() {
    if (parameters_.empty()) return;
    const std::lock_guard lock(others().mutex);
    for (const at::Tensor& parameter : parameters_) others().busy.erase(parameter.unsafeGetTensorImpl());
    others().changed.notify_all();
  }
  FirstGradients(const FirstGradients&) = delete;
  FirstGradients& operator=(const FirstGradients&) = delete;

  // Those that had none, some several times.
  const variable_list& parameters() const { return parameters_; }

 private:
  struct Others {
    std::mutex mutex;
    std::condition_variable changed;
    std::unordered_set<const void*> busy;
  };
  static Others& others() {
    static Others all;
    return all;
  }

  variable_list parameters_;
};

}  // namespace

struct StageInputs::Start {
  c10::intrusive_ptr<InputNode> node = c10::make_intrusive<InputNode>();
};

StageInputs::StageInputs(const std::vector<at::Tensor>& received, const std::vector<bool>& needs_grad)
    : start_(std::make_unique<Start>()) {
  if (received.size() != needs_grad.size()) {
    throw std::invalid_argument(std::to_string(received.size()) + " tensors were received, but " +
                                std::to_string(needs_grad.size()) + " are said to need a gradient or not.");
  }
  tensors_.reserve(received.size());
  for (std::size_t i = 0; i < received.size(); ++i) {
    const bool has_gradient =
        needs_grad[i] && received[i].defined() && torch::autograd::isDifferentiableType(received[i].scalar_type());
    if (has_gradient && received[i].is_inference()) {
      throw std::invalid_argument("input " + std::to_string(i) +
                                  " is to have a gradient, but was made in inference mode.");
    }
    tensors_.push_back(received[i].defined() ? received[i].variable_data() : at::Tensor());
    // The node has an input for each tensor, so that gradients are found by the tensors' numbers.
    if (has_gradient) {
      torch::autograd::impl::set_gradient_edge(tensors_[i],
                                               {start_->node, start_->node->add_input_metadata(tensors_[i])});
    } else {
      start_->node->add_input_metadata(Node::undefined_input());
    }
  }
}

StageInputs::~StageInputs() = default;
StageInputs::StageInputs(StageInputs&&) noexcept = default;
StageInputs& StageInputs::operator=(StageInputs&&) noexcept = default;

// What a run of the engine starts from: edges into the graph, and the gradients that enter there. A border's is
// undefined, for it has what it needs.
struct StageBackward::Roots {
  edge_list edges;
  variable_list gradients;

  void add(Edge edge, at::Tensor gradient) {
    edges.push_back(std::move(edge));
    gradients.push_back(std::move(gradient));
  }

  // Through all that can be reached, releasing it on the way.
  void run() && {
    if (edges.empty()) return;
    static const at::Tensor kSignal(at::detail::empty_cpu({0}, at::kFloat));
    const Edge root(c10::make_intrusive<RootNode>(kSignal, std::move(edges), std::move(gradients)), 0);
    torch::autograd::Engine::get_default_engine().execute({root}, {kSignal}, /*keep_graph=*/false,
                                                          /*create_graph=*/false, /*accumulate_grad=*/true);
  }
};

struct StageBackward::Graph {
  Graph() = default;
  // A tensor that a node saved may be all that holds the nodes before it, down to the next one that saved a tensor, and
  // so on. So each is released while the others are held, or they would release each other in a recursion.
  ~Graph() {
    for (const BorderPtr& border : borders) border->release();
  }

  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  // Runs, and sees to it that what autograd made the .grad of a parameter belongs to it alone. Autograd looks whether
  // somebody else holds the tensor, but not whether somebody holds its storage, such as a parameter that met this one
  // in a sum of views, or an input of the stage: what is added to one gradient later would be added to the other.
  void run_to_parameters(Roots roots) const {
    const FirstGradients first(parameters);
    std::move(roots).run();
    for (const at::Tensor& parameter : first.parameters()) {
      at::Tensor& gradient = parameter.mutable_grad();
      const bool shared = gradient.defined() && gradient.has_storage() && gradient.storage().use_count() > 1;
      if (shared) gradient = gradient.clone();
    }
  }

  c10::intrusive_ptr<InputNode> inputs;
  // Of each output; not valid for one that requires no gradient.
  edge_list outputs;
  variable_list parameters;
  bool between_halves = false;
  std::vector<BorderPtr> borders;
  Roots of_weight_half;
};

StageBackward::StageBackward(StageInputs inputs, const std::vector<at::Tensor>& outputs)
    : graph_(std::make_unique<Graph>()) {
  if (inputs.start_ == nullptr) throw std::logic_error("the inputs of this backward belong to another one already.");
  graph_->inputs = std::move(inputs.start_->node);
  graph_->outputs.reserve(outputs.size());
  for (const at::Tensor& output : outputs) add_output(output);
}

StageBackward::~StageBackward() = default;
StageBackward::StageBackward(StageBackward&&) noexcept = default;
StageBackward& StageBackward::operator=(StageBackward&&) noexcept = default;

void StageBackward::add_output(const at::Tensor& output) {
  if (graph_ == nullptr || graph_->between_halves) throw std::logic_error("add_output() of a backward that has begun.");
  const bool has_gradient = output.defined() && output.requires_grad();
  graph_->outputs.push_back(has_gradient ? torch::autograd::impl::gradient_edge(output) : Edge());
}

StageBackward::Roots StageBackward::roots(const char* caller, std::vector<at::Tensor> gradients) const {
  if (graph_ == nullptr) throw std::logic_error(std::string(caller) + " of a backward that has run already.");
  if (graph_->between_halves) {
    throw std::logic_error(std::string(caller) + " after input_half(): what is left to run is weight_half().");
  }
  if (gradients.size() != graph_->outputs.size()) {
    throw std::invalid_argument("a stage with " + std::to_string(graph_->outputs.size()) + " outputs was given " +
                                std::to_string(gradients.size()) + " gradients.");
  }
  Roots result;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const Edge& edge = graph_->outputs[i];
    if (!edge.is_valid() || !gradients[i].defined()) continue;
    const auto& expected = edge.function->input_metadata(edge.input_nr);
    if (!expected.is_same_shape(gradients[i])) {
      std::ostringstream message;
      message << "output " << i << " has shape " << expected.shape_as_dim_vector() << ", but its gradient "
              << gradients[i].sizes() << ".";
      throw std::invalid_argument(message.str());
    }
    result.add(edge, std::move(gradients[i]));
  }
  return result;
}

std::vector<at::Tensor> StageBackward::full(std::vector<at::Tensor> output_gradients) {
  Roots all = roots("full()", std::move(output_gradients));
  const std::unique_ptr<Graph> graph = std::move(graph_);
  graph->outputs.clear();
  Division whole(/*inputs=*/nullptr, graph->borders, graph->parameters);
  for (Edge& edge : all.edges) whole.leads_inward(edge);
  graph->run_to_parameters(std::move(all));
  return graph->inputs->take();
}

std::vector<at::Tensor> StageBackward::input_half(std::vector<at::Tensor> output_gradients) {
  Roots all = roots("input_half()", std::move(output_gradients));
  std::unique_ptr<Graph> graph = std::move(graph_);
  graph->outputs.clear();
  Roots of_input_half;
  Division division(graph->inputs.get(), graph->borders, graph->parameters);
  for (std::size_t i = 0; i < all.edges.size(); ++i) {
    Edge& edge = all.edges[i];
    Roots& half = division.leads_inward(edge) ? of_input_half : graph->of_weight_half;
    half.add(std::move(edge), std::move(all.gradients[i]));
  }
  std::move(of_input_half).run();
  for (const BorderPtr& border : graph->borders) {
    border->turn();
    graph->of_weight_half.add({border, 0}, {});
  }
  graph->between_halves = true;
  graph_ = std::move(graph);
  return graph_->inputs->take();
}

void StageBackward::weight_half() {
  if (graph_ == nullptr) throw std::logic_error("weight_half() of a backward that has run already.");
  if (!graph_->between_halves) throw std::logic_error("weight_half() before input_half().");
  const std::unique_ptr<Graph> graph = std::move(graph_);
  graph->run_to_parameters(std::move(graph->of_weight_half));
}

}  // namespace penstock::internal
