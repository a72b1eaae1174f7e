#include "penstock/program/partition/pipe_info.h"

#include <algorithm>
#include <array>
#include <iomanip>
#include <limits>
#include <ostream>
#include <sstream>
#include <utility>

#include "penstock/base/index.h"
#include "penstock/base/text.h"
#include "penstock/program/interpreter/program_state.h"

namespace penstock::internal {
namespace {

std::string type_text(const Value& value) {
  switch (value.kind) {
    case ValueKind::Int: return "int";
    case ValueKind::Float: return "float";
    case ValueKind::Bool: return "bool";
    default: return value.type ? to_string(*value.type) : "tensor";
  }
}

// Returns the outermost modules that are in a stage as a whole, and the innermost of those that are cut.
std::vector<std::string> modules_of(const Graph& graph, const std::vector<int>& stages, int stage) {
  // Indexed by module call: true if all of its nodes are in one stage.
  std::vector<bool> whole(graph.calls.size(), true);
  std::vector<int> home(graph.calls.size(), -1);
  for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
    for (int call = graph.nodes[i].call; call >= 0; call = graph.calls[index(call)].parent) {
      if (home[index(call)] < 0) home[index(call)] = stages[i];
      if (home[index(call)] != stages[i]) whole[index(call)] = false;
    }
  }
  std::vector<std::string> modules;
  for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
    if (stages[i] != stage || graph.nodes[i].call < 0) continue;
    int chosen = graph.nodes[i].call;
    bool is_whole = whole[index(chosen)];
    for (int call = graph.nodes[i].call; call >= 0; call = graph.calls[index(call)].parent) {
      if (!whole[index(call)] || graph.calls[index(call)].path.empty()) break;
      chosen = call;
      is_whole = true;
    }
    const std::string& path = graph.calls[index(chosen)].path;
    // Nodes between modules belong to the model itself, which has no name.
    if (path.empty()) continue;
    std::string name = is_whole ? path : "part of " + path;
    if (std::find(modules.begin(), modules.end(), name) == modules.end()) modules.push_back(std::move(name));
  }
  return modules;
}

// Returns "2.99 k", to be followed by a unit.
std::string amount(double number) {
  constexpr std::array<const char*, 5> kPrefixes{"", "k", "M", "G", "T"};
  std::size_t prefix = 0;
  while (number >= 999.5 && prefix + 1 < kPrefixes.size()) {
    number /= 1000;
    ++prefix;
  }
  std::ostringstream text;
  text << std::setprecision(3) << number << " " << kPrefixes[prefix];
  return std::move(text).str();
}

// Adds to a sum, which saturates at the largest number like TensorType::bytes().
void add(std::int64_t more, std::int64_t& sum) {
  if (__builtin_add_overflow(sum, more, &sum)) sum = std::numeric_limits<std::int64_t>::max();
}

}  // namespace

PipeInfo make_pipe_info(const Program& program, const std::vector<int>& stage_of_node,
                        const std::vector<StagePartition>& partitions, const std::vector<StageModule>& modules,
                        const Wiring& wiring) {
  PipeInfo info;
  const Graph& graph = program.graph();
  const std::vector<NodeCost> costs = estimated_costs(program);
  const Effects& effects = state_of(program).exported->effects;
  info.name = program.name();
  for (int stage = 0; stage < static_cast<int>(partitions.size()); ++stage) {
    const StagePartition& partition = partitions[index(stage)];
    PipeInfo::Stage statistics{.modules = modules_of(graph, stage_of_node, stage),
                               .nodes = static_cast<int>(partition.nodes.size())};
    for (const auto& [name, tensor] : modules[index(stage)].parameters) {
      const auto bytes = static_cast<std::int64_t>(tensor.nbytes());
      add(tensor.numel(), statistics.parameters);
      add(bytes, statistics.parameter_bytes);
      if (tensor.requires_grad()) add(bytes, statistics.gradient_bytes);
    }
    for (const auto& [name, tensor] : modules[index(stage)].buffers) {
      add(tensor.numel(), statistics.buffers);
      statistics.buffer_bytes[name] = static_cast<std::int64_t>(tensor.nbytes());
    }
    for (const int number : partition.nodes) {
      statistics.flops += costs[index(number)].flops;
      statistics.seconds += costs[index(number)].seconds;
      for_each_result(graph.nodes[index(number)], [&](int value) {
        const auto& type = graph.values[index(value)].type;
        if (type && effects.view_of[index(value)] < 0) add(type->bytes(), statistics.saved_activation_bytes);
      });
    }
    info.stages.push_back(std::move(statistics));
  }
  for (const Wiring::Link& link : wiring.links()) {
    if (!link.values) continue;
    for (const StageOutput& output : *link.values) {
      const Value& value = graph.values[index(partitions[index(output.stage)].results[index(output.output)])];
      info.boundary_values.push_back({.name = value.name,
                                      .from = link.from,
                                      .to = link.to,
                                      .type = type_text(value),
                                      .bytes = value.type ? value.type->bytes() : 8});
    }
  }
  return info;
}

}  // namespace penstock::internal

namespace penstock {

std::string statistics_text(const PipeInfo::Stage& stage) {
  std::string parameters = internal::amount(static_cast<double>(stage.parameters));
  if (!parameters.ends_with(' ')) parameters += " ";
  return internal::concat(parameters, "parameters, ", internal::amount(stage.flops), "FLOP a forward, ",
                          internal::amount(static_cast<double>(stage.saved_activation_bytes)),
                          "B of saved activations");
}

std::ostream& operator<<(std::ostream& out, const Pipe& pipe) {
  const PipeInfo& info = pipe.info();
  out << info.name << ": " << info.stages.size() << (info.stages.size() == 1 ? " stage" : " stages") << "\n";
  for (std::size_t i = 0; i < info.stages.size(); ++i) {
    const PipeInfo::Stage& stage = info.stages[i];
    out << "  stage " << i << ": " << internal::join(stage.modules);
    if (stage.modules.empty())
      out << stage.nodes << (stage.nodes == 1 ? " operation" : " operations") << " of the model itself";
    out << "\n    " << statistics_text(stage) << "\n";
    for (const PipeInfo::BoundaryValue& value : info.boundary_values) {
      if (value.from != static_cast<int>(i)) continue;
      out << "    -> stage " << value.to << ": " << value.name << " " << value.type << "\n";
    }
  }
  for (const std::map<int, std::string>& shared : pipe.replicated_params()) {
    out << "  shared: " << shared.begin()->second << " by stages";
    for (const auto& [stage, name] : shared) out << (stage == shared.begin()->first ? " " : ", ") << stage;
    out << "\n";
  }
  return out;
}

}  // namespace penstock
