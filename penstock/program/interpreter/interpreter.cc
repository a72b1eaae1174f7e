#include "penstock/program/interpreter/interpreter.h"

#include <ATen/core/List.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/ScalarTypeToTypeMeta.h>

#include <algorithm>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/program/error.h"
#include "penstock/program/interpreter/mode.h"
#include "penstock/program/interpreter/operator_checks.h"
#include "penstock/program/interpreter/recomputed_modules.h"
#include "penstock/stage/recomputation.h"
#include "penstock/tensor/autocast_scope.h"
#include "penstock/tensor/random_scope.h"
#include "penstock/tensor/reason.h"

namespace penstock::internal {
namespace {

// Sets grad mode and autocast for consecutive nodes of a region.
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

struct Interpreter::Call {
  // An operand with slots instead of values.
  struct Argument {
    c10::IValue constant;
    int slot = -1;
    // True if nothing reads the slot afterwards, so that its content can be moved.
    bool is_last_use = false;
    Operand::Conversion conversion = Operand::Conversion::None;
    Operand::ListKind list = Operand::ListKind::None;
    std::vector<Argument> elements = {};
  };

  int node = 0;
  // Null if the operator needs no check.
  ArgumentCheck check = nullptr;
  std::vector<Argument> arguments = {};
  // Results with slots instead of values.
  std::vector<Node::Result> results = {};
  // Slots of results that nothing reads.
  std::vector<int> released = {};
  std::optional<EvaluationChange> in_evaluation = std::nullopt;
  // True for an assertion of the dtype that a tensor had in the export, which autocast of the whole run changes.
  bool asserts_dtype = false;
};

struct Interpreter::Plan {
  std::shared_ptr<const Graph> graph;
  // Initial content of the slots. The inputs are in the first slots.
  std::vector<c10::IValue> initial;
  std::size_t inputs = 0;
  // Slots of the weights.
  std::size_t weights_begin = 0;
  std::size_t weights_end = 0;
  // Value of each slot.
  std::vector<int> values;
  std::vector<Call> calls;
  std::vector<Call::Argument> outputs;

  static c10::IValue load(const Call::Argument& argument, std::vector<c10::IValue>& slots);
  void run(const Call& call, std::vector<c10::IValue>& slots, torch::jit::Stack& stack, bool training) const;

  // Calls in execution order, from `begin` to before `end`.
  struct Range {
    std::size_t begin = 0;
    std::size_t end = 0;
  };
  void run(Range range, std::vector<c10::IValue>& slots, const Mode& mode) const;
  // Runs calls so that their inputs are all that is saved of them, from which the backward runs them again.
  static void run_recomputed(const std::shared_ptr<const Plan>& plan, Range range, std::vector<c10::IValue>& slots,
                             const Mode& mode);
  // Returns the slots that the calls read and others have written, except for weights. Takes little time compared with
  // the operators.
  std::vector<std::size_t> inputs_of(Range range) const;
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

c10::IValue Interpreter::Plan::load(const Call::Argument& argument, std::vector<c10::IValue>& slots) {
  const auto element = [&](const Call::Argument& item) { return load(item, slots); };
  switch (argument.list) {
    case Operand::ListKind::None: break;
    case Operand::ListKind::Tensors:
      return list_of<at::Tensor>(argument.elements,
                                 [&](const Call::Argument& item) { return element(item).toTensor(); });
    case Operand::ListKind::OptionalTensors:
      return list_of<std::optional<at::Tensor>>(
          argument.elements, [&](const Call::Argument& item) { return element(item).toOptional<at::Tensor>(); });
    case Operand::ListKind::Ints:
      return list_of<std::int64_t>(argument.elements,
                                   [&](const Call::Argument& item) { return element(item).toScalar().toLong(); });
    case Operand::ListKind::Floats:
      return list_of<double>(argument.elements,
                             [&](const Call::Argument& item) { return element(item).toScalar().toDouble(); });
    case Operand::ListKind::Bools:
      return list_of<bool>(argument.elements,
                           [&](const Call::Argument& item) { return element(item).toScalar().toBool(); });
  }
  if (argument.slot < 0) return argument.constant;
  c10::IValue& slot = slots[static_cast<std::size_t>(argument.slot)];
  return converted(argument.is_last_use ? std::move(slot) : slot, argument.conversion);
}

void Interpreter::Plan::run(const Call& call, std::vector<c10::IValue>& slots, torch::jit::Stack& stack,
                            bool training) const {
  const Node& node = graph->nodes[static_cast<std::size_t>(call.node)];
  stack.clear();
  for (const Call::Argument& argument : call.arguments) stack.push_back(load(argument, slots));
  if (!training && call.in_evaluation) {
    for (const auto& [index, operand] : call.in_evaluation->operands) stack[index] = operand;
  }
  if (const auto* handle = std::get_if<c10::OperatorHandle>(&node.function)) {
    if (training || !call.in_evaluation || !call.in_evaluation->skipped) {
      if (call.check != nullptr) call.check(stack);
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
      for (const int slot : result.values) {
        if (slot >= 0) slots[static_cast<std::size_t>(slot)] = std::move(stack[i]);
      }
      continue;
    }
    const auto list = std::move(stack[i]).toList();
    if (list.size() != result.values.size()) {
      throw ProgramError(
          concat("returned ", list.size(), " values, expected ", result.values.size(), ", as in the export."));
    }
    for (std::size_t k = 0; k < result.values.size(); ++k) {
      if (result.values[k] >= 0) slots[static_cast<std::size_t>(result.values[k])] = list.get(k);
    }
  }
  stack.clear();
  for (const int slot : call.released) slots[static_cast<std::size_t>(slot)] = c10::IValue();
}

void Interpreter::Plan::run(Range range, std::vector<c10::IValue>& slots, const Mode& mode) const {
  const bool is_seeded = RandomScope::is_open();
  std::optional<AutocastScope> autocast;
  if (mode.autocast) autocast.emplace(graph->device_type, *mode.autocast);
  std::optional<RegionScope> scope;
  int region = 0;
  torch::jit::Stack stack;
  for (std::size_t i = range.begin; i < range.end; ++i) {
    const Call& call = calls[i];
    const Node& node = graph->nodes[static_cast<std::size_t>(call.node)];
    if (node.region != region) {
      scope.reset();
      region = node.region;
      if (region != 0) scope.emplace(graph->regions[static_cast<std::size_t>(region)]);
    }
    if (call.asserts_dtype && mode.autocast) continue;
    std::optional<RandomScope> random;
    if (is_seeded) random.emplace(call.node);
    try {
      run(call, slots, stack, mode.training);
      if (mode.after_node) mode.after_node(call.node);
    } catch (const std::exception& error) {
      throw ProgramError(concat(describe(*graph, node), ": ", reason_of(error)));
    }
  }
}

std::vector<std::size_t> Interpreter::Plan::inputs_of(Range range) const {
  std::vector<std::size_t> read_slots;
  std::vector<bool> seen(initial.size(), false);
  for (std::size_t slot = weights_begin; slot < weights_end; ++slot) seen[slot] = true;
  const auto read = [&](const Call::Argument& argument, const auto& self) -> void {
    for (const Call::Argument& element : argument.elements) self(element, self);
    if (argument.slot < 0 || seen[static_cast<std::size_t>(argument.slot)]) return;
    seen[static_cast<std::size_t>(argument.slot)] = true;
    read_slots.push_back(static_cast<std::size_t>(argument.slot));
  };
  for (std::size_t i = range.begin; i < range.end; ++i) {
    for (const Call::Argument& argument : calls[i].arguments) read(argument, read);
    for (const Node::Result& result : calls[i].results) {
      for (const int slot : result.values) {
        if (slot >= 0) seen[static_cast<std::size_t>(slot)] = true;
      }
    }
  }
  return read_slots;
}

void Interpreter::Plan::run_recomputed(const std::shared_ptr<const Plan>& plan, Range range,
                                       std::vector<c10::IValue>& slots, const Mode& mode) {
  const std::vector<std::size_t> inputs = plan->inputs_of(range);
  const auto written = [&](std::size_t slot) {
    return mode.recomputed->written[static_cast<std::size_t>(plan->values[slot])];
  };
  // Copies of two inputs would not share memory as these do.
  std::set<int> memories;
  for (const std::size_t slot : inputs) {
    if (written(slot) >= 0 && !memories.insert(written(slot)).second) return plan->run(range, slots, mode);
  }
  // Tensors are kept by the scope, as detached aliases; of those that some node writes into, it keeps copies.
  struct Kept {
    std::size_t slot;
    bool is_tensor;
    c10::IValue other;
  };
  std::vector<at::Tensor> tensors;
  std::vector<Kept> kept;
  bool writes_arguments = false;
  for (const std::size_t slot : inputs) {
    const c10::IValue& content = slots[slot];
    kept.push_back({slot, content.isTensor(), content.isTensor() ? c10::IValue() : content});
    if (!content.isTensor()) continue;
    const at::Tensor& tensor = content.toTensor();
    const bool is_written = tensor.defined() && written(slot) >= 0;
    writes_arguments |= is_written;
    tensors.push_back(is_written ? tensor.detach().clone().set_requires_grad(tensor.requires_grad()) : tensor);
  }
  // Buffers are inputs of the program, and it writes to them after all calls.
  RecomputedPartScope scope(tensors, {.writes_buffers = false, .writes_arguments = writes_arguments});
  tensors.clear();
  plan->run(range, slots, mode);
  Mode again = mode;
  again.after_node = nullptr;
  scope.close(
      [plan, range, kept = std::move(kept), again = std::move(again)](const std::vector<at::Tensor>& inputs_again) {
        std::vector<c10::IValue> slots_again = plan->initial;
        auto next = inputs_again.begin();
        for (const Kept& input : kept) slots_again[input.slot] = input.is_tensor ? c10::IValue(*next++) : input.other;
        plan->run(range, slots_again, again);
      });
}

Interpreter::Interpreter(std::shared_ptr<const Graph> graph, std::span<const int> nodes, std::span<const int> inputs,
                         std::vector<Weight> weights, std::span<const Operand> outputs) {
  auto plan = std::make_shared<Plan>();
  std::unordered_map<int, int> slots;
  const auto add_slot = [&](int value, c10::IValue content) {
    const auto [at, is_new] = slots.try_emplace(value, static_cast<int>(plan->initial.size()));
    if (is_new) {
      plan->initial.push_back(std::move(content));
      plan->values.push_back(value);
    }
    return at->second;
  };
  for (const int value : inputs) {
    // An input that occurs twice gets a second slot, which nothing reads.
    if (slots.contains(value)) {
      plan->initial.emplace_back();
      plan->values.push_back(value);
    } else {
      add_slot(value, {});
    }
  }
  plan->inputs = inputs.size();
  plan->weights_begin = plan->initial.size();
  for (Weight& weight : weights) add_slot(weight.value, std::move(weight.content));
  plan->weights_end = plan->initial.size();

  const auto argument_of = [&](const Operand& operand, const auto& self) -> Call::Argument {
    Call::Argument argument{.constant = operand.constant, .conversion = operand.conversion, .list = operand.list};
    if (operand.is_value()) {
      const auto slot = slots.find(operand.value);
      if (slot == slots.end()) {
        throw ProgramError(concat("value '", graph->values[static_cast<std::size_t>(operand.value)].name,
                                  "' is used before it is produced."));
      }
      argument.slot = slot->second;
    }
    for (const Operand& element : operand.elements) argument.elements.push_back(self(element, self));
    const bool is_fixed =
        argument.list != Operand::ListKind::None && std::ranges::all_of(operand.elements, &Operand::is_constant);
    if (!is_fixed) return argument;
    // A list of constants is built once.
    std::vector<c10::IValue> none;
    return {.constant = Plan::load(argument, none)};
  };
  for (const int number : nodes) {
    const Node& node = graph->nodes[static_cast<std::size_t>(number)];
    Call call{.node = number};
    for (const Operand& operand : node.operands) call.arguments.push_back(argument_of(operand, argument_of));
    if (const auto* handle = std::get_if<c10::OperatorHandle>(&node.function)) {
      call.check = find_argument_check(handle->operator_name());
    }
    call.in_evaluation = evaluation_change(*graph, node);
    call.asserts_dtype = node.operator_name() == "aten::_assert_tensor_metadata";
    for (const Node::Result& result : node.results) {
      Node::Result slotted{.is_list = result.is_list};
      for (const int value : result.values) slotted.values.push_back(value < 0 ? -1 : add_slot(value, {}));
      call.results.push_back(std::move(slotted));
    }
    plan->calls.push_back(std::move(call));
  }
  for (const Operand& output : outputs) plan->outputs.push_back(argument_of(output, argument_of));

  // Walks backwards: the first use of a slot on this walk is its last in a run.
  std::vector<bool> used(plan->initial.size(), false);
  for (std::size_t slot = plan->weights_begin; slot < plan->weights_end; ++slot) used[slot] = true;
  const auto mark = [&](Call::Argument& argument, const auto& self) -> void {
    for (auto element = argument.elements.rbegin(); element != argument.elements.rend(); ++element) {
      self(*element, self);
    }
    if (argument.slot < 0) return;
    const auto slot = static_cast<std::size_t>(argument.slot);
    argument.is_last_use = !used[slot];
    used[slot] = true;
  };
  for (auto output = plan->outputs.rbegin(); output != plan->outputs.rend(); ++output) mark(*output, mark);
  for (auto call = plan->calls.rbegin(); call != plan->calls.rend(); ++call) {
    for (const Node::Result& result : call->results) {
      for (const int slot : result.values) {
        if (slot >= 0 && !used[static_cast<std::size_t>(slot)]) call->released.push_back(slot);
      }
    }
    for (auto argument = call->arguments.rbegin(); argument != call->arguments.rend(); ++argument) {
      mark(*argument, mark);
    }
  }
  plan->graph = std::move(graph);
  plan_ = std::move(plan);
}

Interpreter::~Interpreter() = default;
Interpreter::Interpreter(Interpreter&&) noexcept = default;
Interpreter& Interpreter::operator=(Interpreter&&) noexcept = default;

std::vector<c10::IValue> Interpreter::run(std::vector<c10::IValue> inputs, const Mode& mode) const {
  if (inputs.size() != plan_->inputs) {
    throw ProgramError(concat("found ", inputs.size(), " inputs, expected ", plan_->inputs, "."));
  }
  std::vector<c10::IValue> slots = plan_->initial;
  std::move(inputs.begin(), inputs.end(), slots.begin());
  inputs.clear();
  const bool recomputes = mode.recomputed && RecomputedPartScope::is_useful();
  const auto part_of = [&](std::size_t call) {
    return recomputes ? mode.recomputed->part_of(plan_->calls[call].node) : -1;
  };
  for (Plan::Range range; range.begin < plan_->calls.size(); range.begin = range.end) {
    const int part = part_of(range.begin);
    for (range.end = range.begin + 1; range.end < plan_->calls.size() && part_of(range.end) == part;) ++range.end;
    if (part < 0) {
      plan_->run(range, slots, mode);
    } else {
      Plan::run_recomputed(plan_, range, slots, mode);
    }
  }
  std::vector<c10::IValue> outputs;
  outputs.reserve(plan_->outputs.size());
  for (const Call::Argument& output : plan_->outputs) outputs.push_back(Plan::load(output, slots));
  return outputs;
}

}  // namespace penstock::internal
