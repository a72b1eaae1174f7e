#include "penstock/program/interpreter/recomputed_modules.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "penstock/base/index.h"
#include "penstock/base/nearest.h"
#include "penstock/base/text.h"
#include "penstock/program/error.h"

namespace penstock::internal {
namespace {

// True for the path of an element of a list: "blocks.3", "h.0".
bool is_element(std::string_view path) {
  const std::size_t dot = path.rfind('.');
  const std::string_view last = dot == std::string_view::npos ? path : path.substr(dot + 1);
  return !last.empty() && std::ranges::all_of(last, [](unsigned char c) { return std::isdigit(c) != 0; });
}

// Returns the value in whose memory a value may lie: what it is a view of, or may be itself.
int memory_of(const Effects& effects, int value) {
  for (;;) {
    const int root = effects.root_of(value);
    const int alias = effects.maybe_alias_of[index(root)];
    if (alias < 0) return root;
    value = alias;
  }
}

// True if the node computes a tensor that autograd may save: not a view, a number or integers.
bool computes(const ExportedProgram& exported, std::size_t number) {
  const Node& node = exported.graph.nodes[number];
  bool found = false;
  for_each_result(node, [&](int result) {
    const Value& value = exported.graph.values[index(result)];
    const bool is_new = exported.effects.view_of[index(result)] < 0 || !exported.effects.writes[number].empty();
    const bool is_number =
        value.type && !at::isFloatingType(value.type->dtype) && !at::isComplexType(value.type->dtype);
    found = found || (value.kind == ValueKind::Tensor && is_new && !is_number);
  });
  return found && node.is_operator();
}

// Path of the list, and type of the element.
std::pair<std::string, std::string> kind_of(const ModuleCall& call) {
  const std::size_t dot = call.path.rfind('.');
  return {dot == std::string::npos ? "" : call.path.substr(0, dot), call.type};
}

}  // namespace

RecomputedModules recomputed_modules(const ExportedProgram& exported, std::span<const std::string> names) {
  const Graph& graph = exported.graph;
  std::vector<std::string> known;
  for (const ModuleCall& call : graph.calls) {
    if (!call.path.empty()) known.push_back(call.path);
  }
  for (const std::string& name : names) {
    if (std::ranges::find(known, name) != known.end()) continue;
    const auto near = nearest(name, known);
    throw ProgramError(concat("there is no module '", name, "' to recompute.",
                              near ? concat("\n  Hint: did you mean ", *near, "?") : ""));
  }
  const std::set<std::string> wanted(names.begin(), names.end());
  RecomputedModules result;
  std::map<int, int> part_of_call;
  std::set<int> written;
  for (std::size_t number = 0; number < graph.nodes.size(); ++number) {
    int outermost = -1;
    for (int call = graph.nodes[number].call; call >= 0; call = graph.calls[index(call)].parent) {
      if (wanted.contains(graph.calls[index(call)].path)) outermost = call;
    }
    const int next = static_cast<int>(part_of_call.size());
    result.part_of_node.push_back(outermost < 0 ? -1 : part_of_call.try_emplace(outermost, next).first->second);
    for (const int value : exported.effects.writes[number]) written.insert(memory_of(exported.effects, value));
  }
  for (int value = 0; value < static_cast<int>(graph.values.size()); ++value) {
    const int memory = memory_of(exported.effects, value);
    result.written.push_back(written.contains(memory) ? memory : -1);
  }
  return result;
}

std::vector<std::string> repeated_modules(const ExportedProgram& exported) {
  const Graph& graph = exported.graph;
  std::map<std::string, int> operators;
  for (std::size_t number = 0; number < graph.nodes.size(); ++number) {
    if (!computes(exported, number)) continue;
    for (int call = graph.nodes[number].call; call >= 0; call = graph.calls[index(call)].parent) {
      ++operators[graph.calls[index(call)].path];
    }
  }
  const auto is_block = [&](const ModuleCall& call) { return is_element(call.path) && operators[call.path] > 1; };
  std::map<std::pair<std::string, std::string>, std::set<std::string>> lists;
  for (const ModuleCall& call : graph.calls) {
    if (is_block(call)) lists[kind_of(call)].insert(call.path);
  }
  const auto is_repeated = [&](const ModuleCall& call) { return is_block(call) && lists.at(kind_of(call)).size() > 1; };
  std::vector<std::string> modules;
  for (const ModuleCall& call : graph.calls) {
    if (!is_repeated(call)) continue;
    bool is_outermost = true;
    for (int parent = call.parent; parent >= 0; parent = graph.calls[index(parent)].parent) {
      is_outermost = is_outermost && !is_repeated(graph.calls[index(parent)]);
    }
    if (is_outermost && std::ranges::find(modules, call.path) == modules.end()) modules.push_back(call.path);
  }
  return modules;
}

}  // namespace penstock::internal
