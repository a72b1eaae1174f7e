#include "penstock/program/partition/partition.h"

#include <ATen/core/enum_tag.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "penstock/program/error.h"
#include "penstock/program/partition/colocation.h"
#include "penstock/program/partition/grad_flow.h"

namespace penstock::internal {
namespace {

// Operators that take no longer than it takes to send what they give.
constexpr auto kCheap = std::to_array<std::string_view>({"aten::add",
                                                         "aten::arange",
                                                         "aten::bitwise_and",
                                                         "aten::bitwise_not",
                                                         "aten::bitwise_or",
                                                         "aten::bool",
                                                         "aten::cat",
                                                         "aten::clone",
                                                         "aten::contiguous",
                                                         "aten::cos",
                                                         "aten::detach",
                                                         "aten::div",
                                                         "aten::eq",
                                                         "aten::exp",
                                                         "aten::expand",
                                                         "aten::eye",
                                                         "aten::flatten",
                                                         "aten::full",
                                                         "aten::full_like",
                                                         "aten::ge",
                                                         "aten::gt",
                                                         "aten::le",
                                                         "aten::lift_fresh_copy",
                                                         "aten::linspace",
                                                         "aten::logical_and",
                                                         "aten::logical_not",
                                                         "aten::logical_or",
                                                         "aten::lt",
                                                         "aten::masked_fill",
                                                         "aten::mul",
                                                         "aten::ne",
                                                         "aten::neg",
                                                         "aten::ones",
                                                         "aten::ones_like",
                                                         "aten::outer",
                                                         "aten::permute",
                                                         "aten::pow",
                                                         "aten::reciprocal",
                                                         "aten::repeat",
                                                         "aten::reshape",
                                                         "aten::rsub",
                                                         "aten::scalar_tensor",
                                                         "aten::select",
                                                         "aten::sin",
                                                         "aten::slice",
                                                         "aten::sparse_coo_tensor",
                                                         "aten::squeeze",
                                                         "aten::stack",
                                                         "aten::sub",
                                                         "aten::t",
                                                         "aten::to",
                                                         "aten::transpose",
                                                         "aten::tril",
                                                         "aten::triu",
                                                         "aten::unsqueeze",
                                                         "aten::view",
                                                         "aten::where",
                                                         "aten::zeros",
                                                         "aten::zeros_like"});

// Operators that ask a tensor for its shape, and not for its elements.
constexpr auto kOfShape = std::to_array<std::string_view>(
    {"aten::sym_is_contiguous", "aten::sym_numel", "aten::sym_size", "aten::sym_storage_offset", "aten::sym_stride"});

template <class Names>
bool contains(const Names& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

class Partitioner {
 public:
  Partitioner(const Exported& exported, std::vector<int> stages, bool transmit)
      : exported_(exported),
        transmit_(transmit),
        graph_(exported.graph),
        effects_(exported.effects),
        stages_(std::move(stages)),
        count_(stages_.empty() ? 1 : *std::max_element(stages_.begin(), stages_.end()) + 1),
        parts_(static_cast<std::size_t>(count_)),
        input_of_(graph_.values.size(), -1),
        home_(graph_.values.size(), 0),
        written_in_(graph_.values.size()),
        written_through_(graph_.values.size()),
        bonds_(bonds_of(exported)) {
    for (std::size_t i = 0; i < exported_.inputs.size(); ++i) {
      if (exported_.inputs[i].value >= 0) input_of_[index(exported_.inputs[i].value)] = static_cast<int>(i);
    }
  }

  std::vector<StagePart> run() {
    move_checks();
    find_homes();
    require_order();
    require_together();
    require_detached_alone();
    find_recomputable();
    place_writes();
    for (const ProgramInput& input : exported_.inputs) {
      if (input.kind == ProgramInput::Kind::User) parts_.front().arguments.push_back(input.value);
    }
    for (int stage = 0; stage < count_; ++stage) fill(stage);
    return std::move(parts_);
  }

 private:
  static std::size_t index(int number) { return static_cast<std::size_t>(number); }
  const Value& value(int number) const { return graph_.values[index(number)]; }
  const Node& node(int number) const { return graph_.nodes[index(number)]; }
  std::string named(int number) const { return describe(graph_, node(number)); }

  const ProgramInput* input(int value) const {
    const int number = input_of_[index(value)];
    return number < 0 ? nullptr : &exported_.inputs[index(number)];
  }
  // A parameter, buffer or constant.
  bool is_held(int value) const {
    const ProgramInput* one = input(value);
    return one != nullptr && one->kind != ProgramInput::Kind::User;
  }

  // What gives nothing and writes nothing only checks something: it does so as early as it can, so that nothing has to
  // travel for it. What is written to is checked where it is.
  void move_checks() {
    std::set<int> bound;
    for (const Bond& bond : bonds_) bound.insert(bond.user);
    for (std::size_t i = 0; i < graph_.nodes.size(); ++i) {
      bool gives = !effects_.writes[i].empty();
      for_each_result(graph_.nodes[i], [&](int) { gives = true; });
      if (gives || bound.contains(static_cast<int>(i))) continue;
      stages_[i] = 0;
      for_each_operand_value(graph_.nodes[i], [&](int operand) {
        const int producer = value(operand).producer;
        if (producer >= 0) stages_[i] = std::max(stages_[i], stages_[index(producer)]);
      });
    }
  }

  // The stage in which each value is made, and those in which it is written to.
  void find_homes() {
    for (std::size_t i = 0; i < graph_.nodes.size(); ++i) {
      for_each_result(graph_.nodes[i], [&](int result) { home_[index(result)] = stages_[i]; });
      for (const int written : effects_.writes[i]) {
        written_in_[index(effects_.root_of(written))].insert(stages_[i]);
        written_through_[index(origin_of(written))].insert(stages_[i]);
      }
    }
  }

  void require_order() const {
    std::vector<int> last_stage(graph_.values.size(), 0);
    std::vector<int> last_node(graph_.values.size(), -1);
    for (int number = 0; number < static_cast<int>(graph_.nodes.size()); ++number) {
      const int stage = stages_[index(number)];
      for_each_operand_value(node(number), [&](int operand) {
        if (home_[index(operand)] > stage && !is_held(operand)) {
          throw ProgramError(named(number) + " is in stage " + std::to_string(stage) + " and uses '" +
                             value(operand).name + "', which stage " + std::to_string(home_[index(operand)]) +
                             " makes; stages take values of earlier ones alone.");
        }
        const int root = effects_.root_of(operand);
        if (written_in_[index(root)].empty()) return;
        // What is written to is used in the order of the program.
        if (stage < last_stage[index(root)]) {
          throw ProgramError(named(number) + " is in stage " + std::to_string(stage) + " and uses '" +
                             value(operand).name + "', which " + named(last_node[index(root)]) + " in stage " +
                             std::to_string(last_stage[index(root)]) +
                             " uses before it; what is written to in place is used in the order of the stages.");
        }
        last_stage[index(root)] = stage;
        last_node[index(root)] = number;
      });
    }
  }

  void require_together() const {
    for (const Bond& bond : bonds_) {
      const int writing = bond.writer < 0 ? 0 : stages_[index(bond.writer)];
      const int using_it = bond.user < 0 ? 0 : stages_[index(bond.user)];
      if (writing != using_it) fail_apart(bond, writing, using_it);
    }
  }

  [[noreturn]] void fail_apart(const Bond& bond, int writing, int using_it) const {
    std::string text;
    switch (bond.kind) {
      case Bond::Kind::Held:
        text = "'" + bond.name + "' is written to in stage " + std::to_string(writing) + ", and " + named(bond.user) +
               " uses it in stage " + std::to_string(using_it) +
               ": the next microbatch would not see what was written.";
        break;
      case Bond::Kind::Given:
        text = "the input '" + bond.name + "' is written to, by stage " + std::to_string(writing) +
               "; only the first stage can do that.";
        break;
      case Bond::Kind::Doubtful:
        text = named(bond.writer) + " writes in place to what " + named(bond.user) +
               " uses in another stage, and only in evaluation are these one tensor: " + bond.name + ".";
        break;
    }
    throw ProgramError(text + "\n  Hint: cut so that both are in one stage.");
  }

  bool is_detached(int one) const {
    const int producer = value(one).producer;
    return effects_.view_of[index(one)] >= 0 && producer >= 0 && node(producer).operator_name() == "aten::detach";
  }

  // Where the gradients of a value and of its views meet: the value whose memory they lie in, or a detached view of it.
  int origin_of(int one) const {
    while (effects_.view_of[index(one)] >= 0 && !is_detached(one)) one = effects_.view_of[index(one)];
    return one;
  }

  // What is written through a detached view has a gradient that the tensor behind it has not: to later stages they go as
  // two. If one is written to there, the other would not see it.
  void require_detached_alone() const {
    for (int origin = 0; origin < static_cast<int>(graph_.values.size()); ++origin) {
      const int root = effects_.root_of(origin);
      const std::set<int>& through = written_through_[index(origin)];
      if (origin == root || through.empty() || *written_in_[index(root)].rbegin() == *through.begin()) continue;
      for (const int user : effects_.users[index(root)]) {
        if (stages_[index(user)] <= *through.begin()) continue;
        for_each_operand_value(node(user), [&](int operand) {
          if (effects_.root_of(operand) != root || origin_of(operand) == origin) return;
          throw ProgramError("'" + value(origin).name + "', which is '" + value(root).name +
                             "' detached, is written to in stage " + std::to_string(*through.begin()) + ", and " +
                             named(user) + " uses '" + value(operand).name + "', the same memory, in stage " +
                             std::to_string(stages_[index(user)]) +
                             ", where one of them is written to again.\n  Hint: cut so that both are in one stage.");
        });
      }
    }
  }

  // Whether a later stage than that which makes it writes to it.
  bool is_written_later(int root) const {
    const std::set<int>& written = written_in_[index(root)];
    return !written.empty() && *written.rbegin() > home_[index(root)];
  }

  void find_recomputable() {
    recomputable_.assign(graph_.nodes.size(), false);
    const std::set<int> written = written_values(exported_);
    const std::vector<bool> has_grad =
        nodes_with_grad(exported_, [](const ProgramInput& one) { return one.kind == ProgramInput::Kind::Parameter; });
    for (std::size_t i = 0; i < graph_.nodes.size(); ++i) {
      const Node& one = graph_.nodes[i];
      bool closed = true;
      for_each_operand_value(one, [&](int operand) {
        if (value(operand).kind != ValueKind::Tensor) return;
        const int producer = value(operand).producer;
        // What is written to is another one for the next microbatch.
        const bool again =
            producer >= 0 ? recomputable_[index(producer)] : is_held(operand) && !written.contains(operand);
        closed = closed && again && written_in_[index(effects_.root_of(operand))].empty();
      });
      for_each_result(one,
                      [&](int result) { closed = closed && written_in_[index(effects_.root_of(result))].empty(); });
      const auto* handle = std::get_if<c10::OperatorHandle>(&one.function);
      recomputable_[i] = closed && !has_grad[i] && handle != nullptr && effects_.writes[i].empty() &&
                         contains(kCheap, one.operator_name()) && !handle->hasTag(at::Tag::nondeterministic_seeded);
    }
  }

  // What is written at the end is written where it is made, and held there.
  void place_writes() {
    for (std::size_t i = 0; i < exported_.outputs.size(); ++i) {
      const ProgramOutput& output = exported_.outputs[i];
      if (output.kind == ProgramOutput::Kind::User) continue;
      const int stage = output.operand.is_value() ? home_[index(output.operand.value)] : 0;
      parts_[index(stage)].writes.push_back(static_cast<int>(i));
    }
  }

  // What a stage has while it is filled.
  struct Filling {
    int stage = 0;
    std::set<int> nodes = {};
    std::set<int> made = {};
    std::set<int> held = {};
    // In the order in which they are first needed.
    std::vector<int> numbers = {};
  };

  void fill(int stage) {
    StagePart& part = parts_[index(stage)];
    Filling filling{.stage = stage};
    for (const int argument : part.arguments) filling.made.insert(argument);
    for (int number = 0; number < static_cast<int>(graph_.nodes.size()); ++number) {
      if (stages_[index(number)] != stage) continue;
      filling.nodes.insert(number);
      for_each_result(node(number), [&](int result) { filling.made.insert(result); });
    }
    const std::vector<int> own(filling.nodes.begin(), filling.nodes.end());
    for (const int number : own) need_operands(number, filling);
    for (const int write : part.writes) need_output(exported_.outputs[index(write)], filling);
    if (stage == count_ - 1) {
      for (const ProgramOutput& output : exported_.outputs) {
        if (output.kind == ProgramOutput::Kind::User) need_output(output, filling);
      }
    }
    for (std::size_t i = 0; i < filling.numbers.size(); ++i) need_number(filling.numbers[i], filling);
    part.nodes.assign(filling.nodes.begin(), filling.nodes.end());
    part.held.assign(filling.held.begin(), filling.held.end());
  }

  void need_output(const ProgramOutput& output, Filling& filling) {
    for_each_value(output.operand, [&](int operand) { need(operand, filling); });
    if (output.kind != ProgramOutput::Kind::Buffer && output.kind != ProgramOutput::Kind::Parameter) return;
    for (const ProgramInput& one : exported_.inputs) {
      if (one.name == output.target && one.value >= 0) need(one.value, filling);
    }
  }

  void need_operands(int number, Filling& filling) {
    for_each_operand_value(node(number), [&](int operand) { need(operand, filling); });
  }

  // Lets the stage run a node that is another's too.
  void run_again(int number, Filling& filling) {
    if (!filling.nodes.insert(number).second) return;
    for_each_result(node(number), [&](int result) { filling.made.insert(result); });
    need_operands(number, filling);
  }

  void need(int operand, Filling& filling) {
    if (filling.made.contains(operand)) return;
    if (value(operand).kind != ValueKind::Tensor) {
      filling.numbers.push_back(operand);
      return;
    }
    if (is_held(operand)) {
      const int holder = holder_for(filling.stage, operand);
      if (holder == filling.stage) {
        filling.held.insert(input_of_[index(operand)]);
      } else {
        take(operand, holder, filling);
      }
      return;
    }
    const int producer = value(operand).producer;
    const int root = effects_.root_of(operand);
    const bool is_view = operand != root && !written_in_[index(root)].empty();
    if (is_view && (is_written_later(root) || is_held(root))) {
      const int from = last_before(filling.stage, written_through_[index(operand)]);
      if (from >= 0 && is_detached(operand)) {
        take(operand, from, filling);
      } else {
        run_again(producer, filling);
      }
    } else if (producer >= 0 && recomputable_[index(producer)]) {
      run_again(producer, filling);
    } else {
      take(operand, last_writer_before(filling.stage, operand), filling);
    }
  }

  // The stage that a parameter, buffer or constant comes from: itself, unless it is written to elsewhere or sent.
  int holder_for(int stage, int operand) const {
    const std::set<int>& written = written_in_[index(operand)];
    if (!written.empty()) return *written.rbegin();
    if (!transmit_ || input(operand)->kind != ProgramInput::Kind::Parameter) return stage;
    int first = stage;
    for (const int user : effects_.users[index(operand)]) first = std::min(first, stages_[index(user)]);
    return first;
  }

  // -1 if there is none.
  static int last_before(int stage, const std::set<int>& stages) {
    const auto behind = stages.lower_bound(stage);
    return behind == stages.begin() ? -1 : *std::prev(behind);
  }

  // The stage that has a value as it is before this one.
  int last_writer_before(int stage, int operand) const {
    const int home = home_[index(operand)];
    return effects_.root_of(operand) == operand ? std::max(home, last_before(stage, written_in_[index(operand)]))
                                                : home;
  }

  void take(int operand, int from, Filling& filling) {
    if (value(operand).type && value(operand).type->layout != at::kStrided) {
      throw ProgramError("stage " + std::to_string(filling.stage) + " uses '" + value(operand).name +
                         "', a sparse tensor of stage " + std::to_string(from) +
                         "; these cannot be sent.\n  Hint: cut so that both are in one stage.");
    }
    filling.made.insert(operand);
    std::vector<int>& results = parts_[index(from)].results;
    auto found = std::find(results.begin(), results.end(), operand);
    if (found == results.end()) found = results.insert(results.end(), operand);
    StagePart& part = parts_[index(filling.stage)];
    part.arguments.push_back(operand);
    part.sources.push_back({.stage = from, .output = static_cast<int>(found - results.begin())});
  }

  // A number is computed again if all that it comes from is there; otherwise it travels.
  void need_number(int operand, Filling& filling) {
    if (filling.made.contains(operand)) return;
    std::set<int> nodes = {};
    if (can_be_derived(operand, filling, nodes)) {
      for (const int number : nodes) run_again(number, filling);
    } else {
      take(operand, home_[index(operand)], filling);
    }
  }

  bool can_be_derived(int operand, const Filling& filling, std::set<int>& nodes) const {
    if (filling.made.contains(operand) || filling.held.contains(input_of_[index(operand)])) return true;
    const int producer = value(operand).producer;
    if (producer < 0) return false;
    if (nodes.contains(producer)) return true;
    if (value(operand).kind == ValueKind::Tensor) return false;
    const Node& made_by = node(producer);
    if (made_by.is_operator() && !contains(kOfShape, made_by.operator_name())) return false;
    bool all = true;
    for_each_operand_value(made_by, [&](int one) { all = all && can_be_derived(one, filling, nodes); });
    if (all) nodes.insert(producer);
    return all;
  }

  const Exported& exported_;
  bool transmit_;
  const Graph& graph_;
  const Effects& effects_;
  // By node.
  std::vector<int> stages_;
  int count_;
  std::vector<StagePart> parts_;
  // By value: its number among the program's inputs, the stage that makes it, and those that write to it.
  std::vector<int> input_of_;
  std::vector<int> home_;
  std::vector<std::set<int>> written_in_;
  // By origin: the stages that write to it through itself or its views.
  std::vector<std::set<int>> written_through_;
  std::vector<Bond> bonds_;
  std::vector<bool> recomputable_;
};

}  // namespace

std::vector<StagePart> partition(const Exported& exported, std::vector<int> stages, bool transmit) {
  return Partitioner(exported, std::move(stages), transmit).run();
}

}  // namespace penstock::internal
