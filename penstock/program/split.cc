#include "penstock/program/split.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "penstock/base/index.h"
#include "penstock/base/nearest.h"
#include "penstock/base/text.h"
#include "penstock/program/interpreter/program_state.h"
#include "penstock/program/partition/boundary.h"
#include "penstock/program/partition/even_split.h"

namespace penstock {

using internal::call_ranges;
using internal::CallRange;
using internal::computes;
using internal::concat;
using internal::index;
using internal::nearest;
using internal::state_of;

namespace {

// Returns the stage of each node, given the nodes at which stages start. A stage without tensors to compute is merged
// into the one before it.
std::vector<int> stages_from(const Graph& graph, const std::set<int>& starts) {
  std::vector<int> stages(graph.nodes.size(), 0);
  int stage = 0;
  bool has_work = false;
  int last_work = -1;
  for (int number = 0; number < static_cast<int>(graph.nodes.size()); ++number) {
    if (computes(graph, graph.nodes[index(number)])) last_work = number;
  }
  for (int number = 0; number < static_cast<int>(graph.nodes.size()); ++number) {
    if (starts.contains(number) && has_work && number <= last_work) {
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
  std::string text = concat("there is no module '", name, "' that computes something");
  const auto inner =
      std::ranges::find_if(names, [&](const std::string& path) { return path.starts_with(concat(name, ".")); });
  if (inner != names.end()) {
    text += concat(": it contains modules and is not called itself.\n  Hint: name one of those, such as ", *inner);
  } else if (const auto suggestion = nearest(name, names)) {
    throw ProgramError(concat(text, ".\n  Hint: did you mean ", *suggestion, "?"));
  }
  throw ProgramError(text + ".");
}

}  // namespace

std::vector<int> split_at(const Program& program, const SplitSpec& spec) {
  const Graph& graph = program.graph();
  const std::vector<CallRange> ranges = call_ranges(graph);
  std::set<int> starts(graph.marks.begin(), graph.marks.end());
  for (const auto& [name, point] : spec) {
    bool found = false;
    for (std::size_t call = 0; call < graph.calls.size(); ++call) {
      if (graph.calls[call].path != name || ranges[call].first < 0) continue;
      found = true;
      starts.insert(point == SplitPoint::BEGINNING ? ranges[call].first : ranges[call].last + 1);
    }
    if (!found || name.empty()) fail_unknown(program, name);
  }
  return stages_from(graph, starts);
}

std::vector<int> split_evenly(const Program& program, int stages, std::span<const NodeCost> costs) {
  const Graph& graph = program.graph();
  int work = 0;
  for (const Node& node : graph.nodes) work += computes(graph, node) ? 1 : 0;
  if (stages < 1 || stages > std::max(work, 1)) {
    throw ProgramError(concat("the program cannot be split into ", stages, " stages: it has ", work,
                              " operations on tensors, and each stage needs at least one."));
  }
  return stages_from(graph, internal::even_split(*state_of(program).exported, stages, costs));
}

std::vector<int> split_by(const Program& program, const std::function<int(const Node& node)>& stage_of) {
  const Graph& graph = program.graph();
  std::vector<int> stages;
  std::set<int> used;
  for (const Node& node : graph.nodes) {
    stages.push_back(stage_of(node));
    if (stages.back() < 0) {
      throw ProgramError(
          concat(describe(graph, node), " was put into stage ", stages.back(), "; stages are numbered from 0."));
    }
    used.insert(stages.back());
  }
  // Stages without nodes are dropped.
  std::map<int, int> number;
  for (const int stage : used) number.emplace(stage, static_cast<int>(number.size()));
  for (int& stage : stages) stage = number.at(stage);
  return stages;
}

}  // namespace penstock
