#include "penstock/stage/backward.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/stage/first_gradients.h"
#include "penstock/stage/split_graph.h"

namespace penstock::internal {
namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

// The node at which gradients of a stage's inputs end. It has no children and keeps the gradients that arrive.
class InputNode final : public Node {
 public:
  std::string name() const override { return "PenstockStageInputs"; }

  variable_list apply(variable_list&& gradients) override {
    gradients_ = std::move(gradients);
    return {};
  }

  // Returns a gradient for each input, undefined where none arrived.
  variable_list take() {
    gradients_.resize(num_inputs());
    return std::exchange(gradients_, {});
  }

 private:
  variable_list gradients_;
};

// The node at which a run of the engine starts. Unlike libtorch's GraphRoot it releases the gradients when it returns
// them, and some of them may be undefined.
class RootNode final : public Node {
 public:
  // The engine starts the node with `signal` as its gradient. The gradients are listed as inputs too, so that the
  // engine knows their devices.
  RootNode(const at::Tensor& signal, edge_list edges, variable_list gradients)
      : Node(std::move(edges)), gradients_(std::move(gradients)) {
    add_input_metadata(signal);
    for (const at::Tensor& gradient : gradients_) {
      if (gradient.defined()) add_input_metadata(gradient);
    }
  }

  std::string name() const override { return "PenstockRoots"; }

  // NOLINTNEXTLINE(cppcoreguidelines-rvalue-reference-param-not-moved): the signal is empty
  variable_list apply(variable_list&& /*signal*/) override { return std::exchange(gradients_, {}); }

 private:
  variable_list gradients_;
};

// Returns an empty tensor with which a run of the engine starts. On a device the root has to run on the thread that runs
// the other nodes: that thread would otherwise begin with the first edge before the others are there, and the order of
// nodes, in which gradients are summed, would depend on timing.
at::Tensor signal_of(const edge_list& edges) {
  static const at::Tensor kOnCpu(at::detail::empty_cpu({0}, at::kFloat));
  for (const Edge& edge : edges) {
    const at::Device device = edge.function->input_metadata(edge.input_nr).device();
    if (!device.is_cpu()) return at::empty({0}, device);
  }
  return kOnCpu;
}

}  // namespace

struct StageInputs::Start {
  c10::intrusive_ptr<InputNode> node = c10::make_intrusive<InputNode>();
};

StageInputs::StageInputs(const std::vector<at::Tensor>& received, const std::vector<bool>& needs_grad)
    : start_(std::make_unique<Start>()) {
  if (received.size() != needs_grad.size()) {
    throw std::invalid_argument(concat("StageInputs: found ", needs_grad.size(), " values of needs_grad, expected ",
                                       received.size(), ", one for each tensor received."));
  }
  tensors_.reserve(received.size());
  for (std::size_t i = 0; i < received.size(); ++i) {
    const bool has_gradient =
        needs_grad[i] && received[i].defined() && torch::autograd::isDifferentiableType(received[i].scalar_type());
    if (has_gradient && received[i].is_inference()) {
      throw std::invalid_argument(
          concat("input ", i, " needs a gradient, but is an inference tensor, for which autograd records nothing.\n",
                 "  Hint: create it outside of torch::InferenceMode, or clone it there."));
    }
    tensors_.push_back(received[i].defined() ? received[i].variable_data() : at::Tensor());
    // The node has an input for each tensor, so that gradients have the indices of the tensors.
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

// The edges into the graph from which a run of the engine starts, and the gradients that enter there. The gradient of a
// border is undefined, because the border has saved what it needs.
struct StageBackward::Roots {
  edge_list edges;
  variable_list gradients;

  void add(Edge edge, at::Tensor gradient) {
    edges.push_back(std::move(edge));
    gradients.push_back(std::move(gradient));
  }

  // Runs all nodes that can be reached, and releases what they saved.
  void run() && {
    if (edges.empty()) return;
    const at::Tensor signal = signal_of(edges);
    const Edge root(c10::make_intrusive<RootNode>(signal, std::move(edges), std::move(gradients)), 0);
    torch::autograd::Engine::get_default_engine().execute({root}, {signal}, /*keep_graph=*/false,
                                                          /*create_graph=*/false, /*accumulate_grad=*/true);
  }
};

struct StageBackward::Graph {
  Graph() = default;
  // A tensor that a node saved may hold the only reference to the nodes before it, down to the next one that saved a
  // tensor, and so on. Each is therefore released while the others are held, or they would release each other
  // recursively.
  ~Graph() {
    for (const BorderPtr& border : borders) border->release();
  }

  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  // Runs a backward that adds to gradients of parameters.
  void run_to_parameters(Roots roots) const {
    const FirstGradients first(parameters);
    std::move(roots).run();
    first.copy_shared_storages();
  }

  c10::intrusive_ptr<InputNode> inputs;
  // The gradient edge of each output; not valid for one that requires no gradient.
  edge_list outputs;
  // The parameters that the backward reaches, some several times.
  variable_list parameters;
  bool between_halves = false;
  std::vector<BorderPtr> borders;
  Roots weight_roots;
};

StageBackward::StageBackward(StageInputs inputs, const std::vector<at::Tensor>& outputs)
    : graph_(std::make_unique<Graph>()) {
  if (inputs.start_ == nullptr)
    throw std::logic_error("the inputs of this StageBackward have been moved to another one.");
  graph_->inputs = std::move(inputs.start_->node);
  graph_->outputs.reserve(outputs.size());
  for (const at::Tensor& output : outputs) add_output(output);
}

StageBackward::~StageBackward() = default;
StageBackward::StageBackward(StageBackward&&) noexcept = default;
StageBackward& StageBackward::operator=(StageBackward&&) noexcept = default;

void StageBackward::add_output(const at::Tensor& output) {
  if (graph_ == nullptr || graph_->between_halves)
    throw std::logic_error("add_output() is called after the backward has begun.");
  const bool has_gradient = output.defined() && output.requires_grad();
  graph_->outputs.push_back(has_gradient ? torch::autograd::impl::gradient_edge(output) : Edge());
}

StageBackward::Roots StageBackward::roots(const char* caller, std::vector<at::Tensor> gradients) const {
  if (graph_ == nullptr) throw std::logic_error(concat(caller, " is called on a backward that has already run."));
  if (graph_->between_halves) {
    throw std::logic_error(concat(caller, " is called after input_half(). Only weight_half() is left to run."));
  }
  if (gradients.size() != graph_->outputs.size()) {
    throw std::invalid_argument(concat(caller, ": found ", gradients.size(), " gradients, expected ",
                                       graph_->outputs.size(), ", one for each output of the stage."));
  }
  Roots result;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const Edge& edge = graph_->outputs[i];
    if (!edge.is_valid() || !gradients[i].defined()) continue;
    const auto& expected = edge.function->input_metadata(edge.input_nr);
    if (!expected.is_same_shape(gradients[i])) {
      std::vector<std::int64_t> sizes;
      for (const c10::SymInt& size : expected.shape_as_dim_vector()) sizes.push_back(size.expect_int());
      throw std::invalid_argument(concat("gradient of output ", i, ": found shape ", shape_text(gradients[i].sizes()),
                                         ", expected ", shape_text(sizes), ", the shape of the output."));
    }
    result.add(edge, std::move(gradients[i]));
  }
  return result;
}

std::vector<at::Tensor> StageBackward::full(std::vector<at::Tensor> output_gradients) {
  Roots all = roots("full()", std::move(output_gradients));
  const std::unique_ptr<Graph> graph = std::move(graph_);
  graph->outputs.clear();
  GraphPartition whole(/*inputs=*/nullptr, graph->borders, graph->parameters);
  for (Edge& edge : all.edges) whole.leads_to_input(edge);
  graph->run_to_parameters(std::move(all));
  return graph->inputs->take();
}

std::vector<at::Tensor> StageBackward::input_half(std::vector<at::Tensor> output_gradients) {
  Roots all = roots("input_half()", std::move(output_gradients));
  std::unique_ptr<Graph> graph = std::move(graph_);
  graph->outputs.clear();
  Roots input_roots;
  GraphPartition partition(graph->inputs.get(), graph->borders, graph->parameters);
  for (std::size_t i = 0; i < all.edges.size(); ++i) {
    Edge& edge = all.edges[i];
    Roots& half = partition.leads_to_input(edge) ? input_roots : graph->weight_roots;
    half.add(std::move(edge), std::move(all.gradients[i]));
  }
  std::move(input_roots).run();
  for (const BorderPtr& border : graph->borders) {
    border->start_weight_half();
    graph->weight_roots.add({border, 0}, {});
  }
  graph->between_halves = true;
  graph_ = std::move(graph);
  return graph_->inputs->take();
}

void StageBackward::weight_half() {
  if (graph_ == nullptr) throw std::logic_error("weight_half() is called on a backward that has already run.");
  if (!graph_->between_halves) throw std::logic_error("weight_half() is called before input_half().");
  const std::unique_ptr<Graph> graph = std::move(graph_);
  graph->run_to_parameters(std::move(graph->weight_roots));
}

}  // namespace penstock::internal
