#include "penstock/program/partition/partition.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "penstock/base/index.h"
#include "penstock/base/text.h"
#include "penstock/program/error.h"
#include "penstock/program/partition/recomputable.h"
#include "penstock/program/partition/stage_assignment.h"

namespace penstock::internal {
namespace {

class Partitioner {
 public:
  Partitioner(const ExportedProgram& exported, std::vector<int> stages, bool transmit)
      : exported_(exported),
        effects_(exported.effects),
        transmit_(transmit),
        assignment_(exported, std::move(stages)),
        partitions_(index(assignment_.num_stages())) {}

  std::vector<StagePartition> run() {
    assignment_.check();
    recomputable_ = recomputable_nodes(assignment_);
    place_writes();
    for (const ProgramInput& input : exported_.inputs) {
      if (input.kind == ProgramInput::Kind::User) partitions_.front().arguments.push_back(input.value);
    }
    for (int stage = 0; stage < assignment_.num_stages(); ++stage) fill(stage);
    return std::move(partitions_);
  }

 private:
  // State of a stage while fill() collects what it needs.
  struct Filling {
    int stage = 0;
    std::set<int> nodes = {};
    // Values that the stage takes or produces.
    std::set<int> available = {};
    std::set<int> weights = {};
    // Numbers that the stage needs, in the order of their first use. They come last: whether one is recomputed depends
    // on the tensors that the stage has.
    std::vector<int> numbers = {};
  };

  const Value& value(int number) const { return assignment_.value(number); }
  const Node& node(int number) const { return assignment_.node(number); }

  // A mutation is performed by the stage that produces the new content.
  void place_writes() {
    for (std::size_t i = 0; i < exported_.outputs.size(); ++i) {
      const ProgramOutput& output = exported_.outputs[i];
      if (output.kind == ProgramOutput::Kind::User) continue;
      const int stage = output.operand.is_value() ? assignment_.home(output.operand.value) : 0;
      partitions_[index(stage)].writes.push_back(static_cast<int>(i));
    }
  }

  void fill(int stage) {
    StagePartition& partition = partitions_[index(stage)];
    Filling filling{.stage = stage};
    for (const int argument : partition.arguments) filling.available.insert(argument);
    for (int number = 0; number < static_cast<int>(exported_.graph.nodes.size()); ++number) {
      if (assignment_.stage_of(number) != stage) continue;
      filling.nodes.insert(number);
      for_each_result(node(number), [&](int result) { filling.available.insert(result); });
    }
    const std::vector<int> assigned(filling.nodes.begin(), filling.nodes.end());
    for (const int number : assigned) need_operands(number, filling);
    for (const int write : partition.writes) need_output(exported_.outputs[index(write)], filling);
    if (stage == assignment_.num_stages() - 1) {
      for (const ProgramOutput& output : exported_.outputs) {
        if (output.kind == ProgramOutput::Kind::User) need_output(output, filling);
      }
    }
    // need_number may append further numbers.
    for (std::size_t i = 0; i < filling.numbers.size(); ++i) need_number(filling.numbers[i], filling);
    partition.nodes.assign(filling.nodes.begin(), filling.nodes.end());
    partition.weights.assign(filling.weights.begin(), filling.weights.end());
  }

  void need_output(const ProgramOutput& output, Filling& filling) {
    for_each_value(output.operand, [&](int operand) { need(operand, filling); });
    if (output.kind != ProgramOutput::Kind::Buffer && output.kind != ProgramOutput::Kind::Parameter) return;
    for (const ProgramInput& input : exported_.inputs) {
      if (input.name == output.target && input.value >= 0) need(input.value, filling);
    }
  }

  void need_operands(int number, Filling& filling) {
    for_each_operand_value(node(number), [&](int operand) { need(operand, filling); });
  }

  // Lets the stage run a node of another stage as well.
  void recompute(int number, Filling& filling) {
    if (!filling.nodes.insert(number).second) return;
    for_each_result(node(number), [&](int result) { filling.available.insert(result); });
    need_operands(number, filling);
  }

  // Makes a value available in the stage: as a weight, by recomputation, or from another stage.
  void need(int operand, Filling& filling) {
    if (filling.available.contains(operand)) return;
    if (value(operand).kind != ValueKind::Tensor) {
      filling.numbers.push_back(operand);
      return;
    }
    if (assignment_.is_weight(operand)) {
      const int owner = owner_of_weight(operand, filling.stage);
      if (owner == filling.stage) {
        filling.weights.insert(assignment_.input_index(operand));
      } else {
        receive(operand, owner, filling);
      }
      return;
    }
    const int producer = value(operand).producer;
    const int root = effects_.root_of(operand);
    const bool is_written_view = operand != root && !assignment_.writing_stages(root).empty();
    if (is_written_view && (assignment_.is_written_later(root) || assignment_.is_weight(root))) {
      const int from = last_before(filling.stage, assignment_.stages_writing_through(operand));
      if (from >= 0 && assignment_.is_detached_view(operand)) {
        receive(operand, from, filling);
      } else {
        recompute(producer, filling);
      }
    } else if (producer >= 0 && recomputable_[index(producer)]) {
      recompute(producer, filling);
    } else {
      receive(operand, last_writer_before(filling.stage, operand), filling);
    }
  }

  // Returns the stage from which `stage` gets a parameter, buffer or constant: itself, unless another stage writes to
  // it or transmits it.
  int owner_of_weight(int operand, int stage) const {
    const std::set<int>& writing = assignment_.writing_stages(operand);
    if (!writing.empty()) return *writing.rbegin();
    const ProgramInput& input = exported_.inputs[index(assignment_.input_index(operand))];
    if (!transmit_ || input.kind != ProgramInput::Kind::Parameter) return stage;
    int first = stage;
    for (const int user : effects_.users[index(operand)]) first = std::min(first, assignment_.stage_of(user));
    return first;
  }

  // Returns the last of `stages` that is before `stage`, or -1.
  static int last_before(int stage, const std::set<int>& stages) {
    const auto end = stages.lower_bound(stage);
    return end == stages.begin() ? -1 : *std::prev(end);
  }

  // Returns the stage that has the current content of a value when `stage` starts.
  int last_writer_before(int stage, int operand) const {
    const int home = assignment_.home(operand);
    return effects_.root_of(operand) == operand
               ? std::max(home, last_before(stage, assignment_.writing_stages(operand)))
               : home;
  }

  // Lets the stage take a value from another stage.
  void receive(int operand, int from, Filling& filling) {
    if (value(operand).type && value(operand).type->layout != at::kStrided) {
      throw ProgramError(concat("stage ", filling.stage, " uses '", value(operand).name, "', a sparse tensor of stage ",
                                from, "; sparse tensors cannot be sent.\n  Hint: cut so that both are in one stage."));
    }
    filling.available.insert(operand);
    std::vector<int>& results = partitions_[index(from)].results;
    auto found = std::ranges::find(results, operand);
    if (found == results.end()) found = results.insert(results.end(), operand);
    StagePartition& partition = partitions_[index(filling.stage)];
    partition.arguments.push_back(operand);
    partition.sources.push_back({.stage = from, .output = static_cast<int>(found - results.begin())});
  }

  // Recomputes a number if the stage has all that it depends on; otherwise the number is sent.
  void need_number(int operand, Filling& filling) {
    if (filling.available.contains(operand)) return;
    std::set<int> nodes = {};
    if (can_be_derived(operand, filling, nodes)) {
      for (const int number : nodes) recompute(number, filling);
    } else {
      receive(operand, assignment_.home(operand), filling);
    }
  }

  // Returns true if the stage can compute a value from what it has, and adds the nodes to run to `nodes`.
  bool can_be_derived(int operand, const Filling& filling, std::set<int>& nodes) const {
    if (filling.available.contains(operand) || filling.weights.contains(assignment_.input_index(operand))) return true;
    const int producer = value(operand).producer;
    if (producer < 0) return false;
    if (nodes.contains(producer)) return true;
    if (value(operand).kind == ValueKind::Tensor) return false;
    if (node(producer).is_operator() && !reads_shape_only(node(producer))) return false;
    bool all = true;
    for_each_operand_value(node(producer), [&](int needed) { all = all && can_be_derived(needed, filling, nodes); });
    if (all) nodes.insert(producer);
    return all;
  }

  const ExportedProgram& exported_;
  const Effects& effects_;
  bool transmit_;
  StageAssignment assignment_;
  // Indexed by stage.
  std::vector<StagePartition> partitions_;
  // Indexed by node.
  std::vector<bool> recomputable_;
};

}  // namespace

std::vector<StagePartition> partition(const ExportedProgram& exported, std::vector<int> stages, bool transmit) {
  return Partitioner(exported, std::move(stages), transmit).run();
}

}  // namespace penstock::internal
