#include "penstock/program/interpreter/interpreter.h"

#include <ATen/core/List.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/ScalarTypeToTypeMeta.h>

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <utility>

#include "penstock/program/error.h"
#include "penstock/program/interpreter/mode.h"
#include "penstock/tensor/autocast_scope.h"
#include "penstock/tensor/random_scope.h"
#include "penstock/tensor/reason.h"

namespace penstock::internal {
namespace {

// What holds around a row of nodes.
class RegionScope {
 public:
  explicit RegionScope(const Region& region) {
    if (region.grad) grad_.emplace(*region.grad);
    if (region.autocast) autocast_.emplace(region.autocast->device, region.autocast->dtype, region.autocast->enabled);
  }

 private:
  std::optional<c10::AutoGradMode> grad_;
  std::optional<AutocastScope> autocast_;
};

c10::IValue converted(c10::IValue value, Operand::Conversion conversion) {
  if (conversion == Operand::Conversion::None || value.isTensor()) return value;
  if (conversion == Operand::Conversion::ToFloat) {
    return value.isDouble() ? std::move(value) : c10::IValue(value.toScalar().toDouble());
  }
  const at::Scalar number = value.toScalar();
  at::Tensor tensor = at::scalar_tensor(number, at::TensorOptions(number.isFloatingPoint() ? at::kDouble
                                                                  : number.isBoolean()     ? at::kBool
                                                                                           : at::kLong));
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

}  // namespace

struct Code::Call {
  // An operand with places instead of values.
  struct Argument {
    c10::IValue constant;
    int place = -1;
    // The last use of what is there.
    bool last = false;
    Operand::Conversion conversion = Operand::Conversion::None;
    Operand::ListKind list = Operand::ListKind::None;
    std::vector<Argument> elements = {};
  };

  int node = 0;
  std::vector<Argument> arguments = {};
  std::vector<Node::Result> results = {};
  // What is used no more after this, and was not taken as a last use.
  std::vector<int> released = {};
  std::optional<EvaluationChange> in_evaluation = std::nullopt;
};

struct Code::Plan {
  std::shared_ptr<const Graph> graph;
  // What the places hold when a run begins; inputs go to the first.
  std::vector<c10::IValue> initial;
  std::size_t inputs = 0;
  std::vector<Call> calls;
  std::vector<Call::Argument> outputs;

  static c10::IValue take(const Call::Argument& argument, std::vector<c10::IValue>& places);
  void run(const Call& call, std::vector<c10::IValue>& places, torch::jit::Stack& stack, bool training) const;
};

namespace {

template <class Element, class Convert>
c10::IValue list_of(const auto& arguments, Convert convert) {
  c10::List<Element> list;
  list.reserve(arguments.size());
  for (const auto& argument : arguments) list.push_back(convert(argument));
  return list;
}

}  // namespace

c10::IValue Code::Plan::take(const Call::Argument& argument, std::vector<c10::IValue>& places) {
  const auto element = [&](const Call::Argument& one) { return take(one, places); };
  switch (argument.list) {
    case Operand::ListKind::None: break;
    case Operand::ListKind::Tensors:
      return list_of<at::Tensor>(argument.elements, [&](const Call::Argument& one) { return element(one).toTensor(); });
    case Operand::ListKind::OptionalTensors:
      return list_of<std::optional<at::Tensor>>(
          argument.elements, [&](const Call::Argument& one) { return element(one).toOptional<at::Tensor>(); });
    case Operand::ListKind::Ints:
      return list_of<std::int64_t>(argument.elements,
                                   [&](const Call::Argument& one) { return element(one).toScalar().toLong(); });
    case Operand::ListKind::Floats:
      return list_of<double>(argument.elements,
                             [&](const Call::Argument& one) { return element(one).toScalar().toDouble(); });
    case Operand::ListKind::Bools:
      return list_of<bool>(argument.elements,
                           [&](const Call::Argument& one) { return element(one).toScalar().toBool(); });
  }
  if (argument.place < 0) return argument.constant;
  c10::IValue& place = places[static_cast<std::size_t>(argument.place)];
  return converted(argument.last ? std::move(place) : place, argument.conversion);
}

void Code::Plan::run(const Call& call, std::vector<c10::IValue>& places, torch::jit::Stack& stack,
                     bool training) const {
  const Node& node = graph->nodes[static_cast<std::size_t>(call.node)];
  stack.clear();
  for (const Call::Argument& argument : call.arguments) stack.push_back(take(argument, places));
  if (!training && call.in_evaluation) {
    for (const auto& [index, operand] : call.in_evaluation->operands) stack[index] = operand;
  }
  if (const auto* handle = std::get_if<c10::OperatorHandle>(&node.function)) {
    if (training || !call.in_evaluation || !call.in_evaluation->skipped) {
      if (node.check != nullptr) node.check(stack);
      handle->callBoxed(&stack);
    }
  } else {
    c10::IValue result = std::get<Arithmetic>(node.function)(stack);
    stack.clear();
    stack.push_back(std::move(result));
  }
  for (std::size_t i = 0; i < call.results.size(); ++i) {
    const Node::Result& result = call.results[i];
    if (!result.is_list) {
      for (const int place : result.values) {
        if (place >= 0) places[static_cast<std::size_t>(place)] = std::move(stack[i]);
      }
      continue;
    }
    const auto list = std::move(stack[i]).toList();
    if (list.size() != result.values.size()) {
      throw ProgramError("gave " + std::to_string(list.size()) + " values, and " +
                         std::to_string(result.values.size()) + " when it was exported.");
    }
    for (std::size_t k = 0; k < result.values.size(); ++k) {
      if (result.values[k] >= 0) places[static_cast<std::size_t>(result.values[k])] = list.get(k);
    }
  }
  stack.clear();
  for (const int place : call.released) places[static_cast<std::size_t>(place)] = c10::IValue();
}

Code::Code(std::shared_ptr<const Graph> graph, std::span<const int> nodes, std::span<const int> inputs,
           std::vector<Held> held, std::span<const Operand> outputs) {
  auto plan = std::make_unique<Plan>();
  std::unordered_map<int, int> places;
  const auto add_place = [&](int value, c10::IValue content) {
    const auto [at, is_new] = places.try_emplace(value, static_cast<int>(plan->initial.size()));
    if (is_new) plan->initial.push_back(std::move(content));
    return at->second;
  };
  for (const int value : inputs) {
    // One that is given twice has a place that nobody reads.
    if (places.contains(value)) {
      plan->initial.emplace_back();
    } else {
      add_place(value, {});
    }
  }
  plan->inputs = inputs.size();
  const std::size_t first_held = plan->initial.size();
  for (Held& one : held) add_place(one.value, std::move(one.content));
  const std::size_t end_held = plan->initial.size();

  const auto argument_of = [&](const Operand& operand, const auto& self) -> Call::Argument {
    Call::Argument argument{.constant = operand.constant, .conversion = operand.conversion, .list = operand.list};
    if (operand.is_value()) {
      const auto place = places.find(operand.value);
      if (place == places.end()) {
        throw ProgramError("value '" + graph->values[static_cast<std::size_t>(operand.value)].name +
                           "' is used where nothing has made it.");
      }
      argument.place = place->second;
    }
    for (const Operand& element : operand.elements) argument.elements.push_back(self(element, self));
    const bool is_fixed =
        argument.list != Operand::ListKind::None && std::ranges::all_of(operand.elements, &Operand::is_constant);
    if (!is_fixed) return argument;
    // A list of constants is made once.
    std::vector<c10::IValue> none;
    return {.constant = Plan::take(argument, none)};
  };
  for (const int number : nodes) {
    const Node& node = graph->nodes[static_cast<std::size_t>(number)];
    Call call{.node = number};
    for (const Operand& operand : node.operands) call.arguments.push_back(argument_of(operand, argument_of));
    call.in_evaluation = evaluation_change(*graph, node);
    for (const Node::Result& result : node.results) {
      Node::Result placed{.is_list = result.is_list};
      for (const int value : result.values) placed.values.push_back(value < 0 ? -1 : add_place(value, {}));
      call.results.push_back(std::move(placed));
    }
    plan->calls.push_back(std::move(call));
  }
  for (const Operand& output : outputs) plan->outputs.push_back(argument_of(output, argument_of));

  // From the end: the first time that a place is met is its last use.
  std::vector<bool> used(plan->initial.size(), false);
  for (std::size_t place = first_held; place < end_held; ++place) used[place] = true;
  const auto mark = [&](Call::Argument& argument, const auto& self) -> void {
    for (auto element = argument.elements.rbegin(); element != argument.elements.rend(); ++element) {
      self(*element, self);
    }
    if (argument.place < 0) return;
    const auto place = static_cast<std::size_t>(argument.place);
    argument.last = !used[place];
    used[place] = true;
  };
  for (auto output = plan->outputs.rbegin(); output != plan->outputs.rend(); ++output) mark(*output, mark);
  for (auto call = plan->calls.rbegin(); call != plan->calls.rend(); ++call) {
    for (const Node::Result& result : call->results) {
      for (const int place : result.values) {
        if (place >= 0 && !used[static_cast<std::size_t>(place)]) call->released.push_back(place);
      }
    }
    for (auto argument = call->arguments.rbegin(); argument != call->arguments.rend(); ++argument) {
      mark(*argument, mark);
    }
  }
  plan->graph = std::move(graph);
  plan_ = std::move(plan);
}

Code::~Code() = default;
Code::Code(Code&&) noexcept = default;
Code& Code::operator=(Code&&) noexcept = default;

std::vector<c10::IValue> Code::run(std::vector<c10::IValue> inputs, const Mode& mode) const {
  if (inputs.size() != plan_->inputs) {
    throw ProgramError("was given " + std::to_string(inputs.size()) + " inputs, and takes " +
                       std::to_string(plan_->inputs) + ".");
  }
  std::vector<c10::IValue> places = plan_->initial;
  std::move(inputs.begin(), inputs.end(), places.begin());
  inputs.clear();
  const Graph& graph = *plan_->graph;
  const bool has_random_numbers = RandomScope::is_open();
  std::optional<AutocastScope> around;
  if (mode.autocast) around.emplace(mode.autocast->device, mode.autocast->dtype, mode.autocast->enabled);
  std::optional<RegionScope> scope;
  int region = 0;
  torch::jit::Stack stack;
  for (const Call& call : plan_->calls) {
    const Node& node = graph.nodes[static_cast<std::size_t>(call.node)];
    if (node.region != region) {
      scope.reset();
      region = node.region;
      if (region != 0) scope.emplace(graph.regions[static_cast<std::size_t>(region)]);
    }
    std::optional<RandomScope> random;
    if (has_random_numbers) random.emplace(call.node);
    try {
      plan_->run(call, places, stack, mode.training);
      if (mode.after) mode.after(call.node);
    } catch (const std::exception& error) {
      throw ProgramError(describe(graph, node) + ": " + reason_of(error));
    }
  }
  scope.reset();
  std::vector<c10::IValue> outputs;
  outputs.reserve(plan_->outputs.size());
  for (const Call::Argument& output : plan_->outputs) outputs.push_back(Plan::take(output, places));
  return outputs;
}

}  // namespace penstock::internal
