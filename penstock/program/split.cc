#include "penstock/program/split.h"

#include <algorithm>
#include <limits>
#include <map>
#include <set>

#include "penstock/program/bonds.h"
#include "penstock/program/state.h"
#include "penstock/schedule/nearest.h"

namespace penstock {
namespace {

std::size_t index(int number) {
  return static_cast<std::size_t>(number);
}

// Whether a node computes something, and not only sizes and checks.
bool computes(const Graph& graph, const Node& node) {
  bool tensors = false;
  for_each_result(node, [&](int value) { tensors = tensors || graph.values[index(value)].kind == ValueKind::Tensor; });
  const auto* handle = std::get_if<c10::OperatorHandle>(&node.function);
  return handle != nullptr && (tensors || handle->schema().is_mutable());
}

// The nodes of each call of a module, those of the calls inside of it too: the first and the last.
struct Span {
  int first = -1;
  int last = -1;
};
std::vector<Span> spans_of(const Graph& graph) {
  std::vector<Span> spans(graph.calls.size());
  for (int number = 0; number < static_cast<int>(graph.nodes.size()); ++number) {
    for (int call = graph.nodes[index(number)].call; call >= 0; call = graph.calls[index(call)].parent) {
      Span& span = spans[index(call)];
      if (span.first < 0) span.first = number;
      span.last = number;
    }
  }
  return spans;
}

// From the nodes at which a stage begins.
std::vector<int> stages_from(const Graph& graph, const std::set<int>& beginnings) {
  std::vector<int> stages(graph.nodes.size(), 0);
  int stage = 0;
  // Nothing to compute yet, or no more: no stage of its own.
  bool has_work = false;
  int last_work = -1;
  for (int number = 0; number < static_cast<int>(graph.nodes.size()); ++number) {
    if (computes(graph, graph.nodes[index(number)])) last_work = number;
  }
  for (int number = 0; number < static_cast<int>(graph.nodes.size()); ++number) {
    if (beginnings.contains(number) && has_work && number <= last_work) {
      ++stage;
      has_work = false;
    }
    has_work = has_work || computes(graph, graph.nodes[index(number)]);
    stages[index(number)] = stage;
  }
  return stages;
}

[[noreturn]] void fail_unknown(const Program& program, const std::string& name) {
  std::set<std::string> known;
  for (const ModuleCall& call : program.graph().calls) {
    if (!call.path.empty()) known.insert(call.path);
  }
  const std::vector<std::string> names(known.begin(), known.end());
  std::string text = "there is no module '" + name + "' that computes something";
  const bool is_inside = std::any_of(names.begin(), names.end(), [&](const std::string& one) {
    return one.starts_with(std::string(name).append("."));
  });
  if (is_inside) {
    text += ": it has modules in it, and is not called itself.\n  Hint: name one of those, such as ";
    text += *std::find_if(names.begin(), names.end(),
                          [&](const std::string& one) { return one.starts_with(std::string(name).append(".")); });
  } else if (const auto near = nearest(name, names)) {
    text += ".\n  Hint: did you mean " + *near + "?";
    throw ProgramError(text);
  }
  throw ProgramError(text + ".");
}

// For each node, how long it takes to send what would cross if a stage began with it, there and back.
std::vector<double> crossing_seconds(const Program& program) {
  // A message, a tensor in it, and a byte.
  constexpr double kPerMessage = 2e-5;
  constexpr double kPerTensor = 1e-5;
  constexpr double kPerByte = 4e-10;
  const Graph& graph = program.graph();
  const std::size_t count = graph.nodes.size();
  std::vector<int> last_use(graph.values.size(), -1);
  for (int number = 0; number < static_cast<int>(count); ++number) {
    for_each_operand_value(graph.nodes[index(number)], [&](int value) { last_use[index(value)] = number; });
  }
  for (const ProgramOutput& output : program.outputs()) {
    for_each_value(output.operand, [&](int value) { last_use[index(value)] = static_cast<int>(count); });
  }
  std::vector<double> change(count + 1, 0);
  const auto add = [&](int value, int from) {
    const auto& type = graph.values[index(value)].type;
    if (!type || last_use[index(value)] <= from) return;
    const double seconds = kPerTensor + kPerByte * static_cast<double>(type->bytes());
    change[index(from + 1)] += seconds;
    if (last_use[index(value)] < static_cast<int>(count)) change[index(last_use[index(value)] + 1)] -= seconds;
  };
  for (int number = 0; number < static_cast<int>(count); ++number) {
    for_each_result(graph.nodes[index(number)], [&](int value) { add(value, number); });
  }
  for (const ProgramInput& input : program.inputs()) {
    if (input.kind == ProgramInput::Kind::User) add(input.value, -1);
  }
  std::vector<double> seconds(count, 0);
  double crossing = kPerMessage;
  for (std::size_t i = 0; i < count; ++i) seconds[i] = crossing += change[i];
  return seconds;
}

// For each node, whether a stage may begin with it.
std::vector<bool> possible_beginnings(const Exported& exported) {
  const std::size_t count = exported.graph.nodes.size();
  std::vector<int> change(count + 1, 0);
  for (const Bond& bond : bonds_of(exported)) {
    // Something in the first stage is there from the beginning.
    const auto [first, last] = std::minmax({std::max(bond.writer, 0), std::max(bond.user, 0)});
    ++change[index(first + 1)];
    --change[index(last + 1)];
  }
  std::vector<bool> possible(count, true);
  int bonds = 0;
  for (std::size_t i = 0; i < count; ++i) possible[i] = (bonds += change[i]) == 0;
  return possible;
}

}  // namespace

std::vector<int> split_at(const Program& program, const SplitSpec& spec) {
  const Graph& graph = program.graph();
  const std::vector<Span> spans = spans_of(graph);
  std::set<int> beginnings(graph.marks.begin(), graph.marks.end());
  for (const auto& [name, point] : spec) {
    bool found = false;
    for (std::size_t call = 0; call < graph.calls.size(); ++call) {
      if (graph.calls[call].path != name || spans[call].first < 0) continue;
      found = true;
      beginnings.insert(point == SplitPoint::BEGINNING ? spans[call].first : spans[call].last + 1);
    }
    if (!found || name.empty()) fail_unknown(program, name);
  }
  return stages_from(graph, beginnings);
}

std::vector<int> split_evenly(const Program& program, int stages, std::span<const NodeCost> costs) {
  const Graph& graph = program.graph();
  const int count = static_cast<int>(graph.nodes.size());
  int work = 0;
  for (const Node& node : graph.nodes) work += computes(graph, node) ? 1 : 0;
  if (stages < 1 || stages > std::max(work, 1)) {
    throw ProgramError("the program cannot be cut into " + std::to_string(stages) + " stages: it has " +
                       std::to_string(work) + " operations on tensors, and a stage at least one.");
  }
  const std::vector<bool> possible = possible_beginnings(*program.state()->exported);
  const std::vector<double> crossing = crossing_seconds(program);
  const auto border = [&](int at) { return at <= 0 || at >= count ? 0 : crossing[index(at)]; };
  std::vector<double> before(index(count) + 1, 0);
  std::vector<int> work_before(index(count) + 1, 0);
  for (int i = 0; i < count; ++i) {
    before[index(i + 1)] = before[index(i)] + costs[index(i)].seconds;
    work_before[index(i + 1)] = work_before[index(i)] + (computes(graph, graph.nodes[index(i)]) ? 1 : 0);
  }
  // best[k][i]: nodes from 0 to i in k stages; the slowest of them, then all that crosses.
  using Best = std::pair<double, double>;
  const Best never{std::numeric_limits<double>::infinity(), 0};
  std::vector<std::vector<Best>> best(index(stages) + 1, std::vector<Best>(index(count) + 1, never));
  std::vector<std::vector<int>> from(index(stages) + 1, std::vector<int>(index(count) + 1, 0));
  best[0][0] = {0, 0};
  for (int k = 1; k <= stages; ++k) {
    for (int end = 1; end <= count; ++end) {
      for (int begin = end - 1; begin >= 0; --begin) {
        // The stage grows from here on, and so does what it takes.
        const double nodes = before[index(end)] - before[index(begin)];
        if (nodes > best[index(k)][index(end)].first) break;
        const Best& so_far = best[index(k - 1)][index(begin)];
        if (!possible[index(begin)] || so_far.first == never.first ||
            work_before[index(end)] == work_before[index(begin)])
          continue;
        const double stage = nodes + border(begin) + border(end);
        const Best candidate{std::max(so_far.first, stage), so_far.second + border(begin)};
        if (candidate < best[index(k)][index(end)]) {
          best[index(k)][index(end)] = candidate;
          from[index(k)][index(end)] = begin;
        }
      }
    }
  }
  if (count > 0 && best[index(stages)][index(count)].first == never.first) {
    int most = stages;
    while (best[index(most)][index(count)].first == never.first) --most;
    throw ProgramError("the program cannot be cut into " + std::to_string(stages) +
                       " stages: what is written to in place keeps nodes together, and " + std::to_string(most) +
                       (most == 1 ? " stage is" : " stages are") + " the most.");
  }
  std::set<int> beginnings;
  int end = count;
  for (int k = stages; k > 1; --k) {
    end = from[index(k)][index(end)];
    beginnings.insert(end);
  }
  return stages_from(graph, beginnings);
}

std::vector<int> split_by(const Program& program, const std::function<int(const Node& node)>& stage_of) {
  const Graph& graph = program.graph();
  std::vector<int> stages;
  std::set<int> used;
  for (const Node& node : graph.nodes) {
    stages.push_back(stage_of(node));
    if (stages.back() < 0) {
      throw ProgramError(describe(graph, node) + " was put into stage " + std::to_string(stages.back()) +
                         "; stages count from 0.");
    }
    used.insert(stages.back());
  }
  // Numbers that no node has are left out.
  std::map<int, int> number;
  for (const int stage : used) number.emplace(stage, static_cast<int>(number.size()));
  for (int& stage : stages) stage = number.at(stage);
  return stages;
}

}  // namespace penstock
