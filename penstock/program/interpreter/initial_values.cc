#include "penstock/program/interpreter/initial_values.h"

#include <ATen/core/Tensor.h>

#include <cmath>
#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "penstock/base/text.h"
#include "penstock/program/error.h"
#include "penstock/program/program.h"

namespace penstock::internal {
namespace {

using Sizes = std::vector<std::int64_t>;

// Facts of the program that determine initial values.
struct Modules {
  std::string program;
  // Python class by the path of a module, and sizes by the name of a weight.
  std::map<std::string, std::string> classes;
  std::map<std::string, Sizes> sizes;
  // Row of an embedding that stands for padding, by the name of its weight.
  std::map<std::string, std::int64_t> padding;
};

// Returns the rows of embeddings that stand for padding.
std::map<std::string, std::int64_t> padding_rows(const Program& program) {
  std::map<int, std::int64_t> by_value;
  for (const Node& node : program.graph().nodes) {
    const auto* const handle = std::get_if<c10::OperatorHandle>(&node.function);
    if (handle == nullptr || handle->operator_name().name != "aten::embedding" || node.operands.size() < 3) continue;
    const c10::IValue& row = node.operands[2].constant;
    if (row.isInt() && row.toInt() >= 0) by_value.emplace(node.operands[0].value, row.toInt());
  }
  std::map<std::string, std::int64_t> rows;
  for (const ProgramInput& input : program.inputs()) {
    if (const auto found = by_value.find(input.value); found != by_value.end()) rows.emplace(input.name, found->second);
  }
  // A tied weight has its values by its first name.
  for (const WeightInfo& weight : program.weights()) {
    for (const std::string& name : weight.names) {
      if (const auto found = rows.find(name); found != rows.end()) rows.emplace(weight.names.front(), found->second);
    }
  }
  return rows;
}

// Number of inputs of each output of a linear layer or a convolution.
double inputs_of(const Sizes& weight) {
  double inputs = 1;
  for (std::size_t i = 1; i < weight.size(); ++i) inputs *= static_cast<double>(weight[i]);
  return inputs;
}

// Sets the values as the module's class does; returns false if the class is not known, or has no such member.
bool set_as_module_does(const Modules& modules, const std::string& name, at::Tensor& values) {
  const WeightName parts(name);
  const std::string& member = parts.member;
  const auto class_of = [&](const std::string& module) {
    const auto found = modules.classes.find(module);
    return found == modules.classes.end() ? std::string() : found->second;
  };
  std::string module_class = class_of(parts.module);
  // Attention uses the weights of this layer without calling it.
  const WeightName parent(parts.module);
  if (parent.member == "out_proj" && class_of(parent.module).ends_with(".MultiheadAttention")) {
    if (member == "bias") {
      values.zero_();
      return true;
    }
    module_class = "torch.nn.modules.linear.Linear";
  }
  const auto is_in = [&](const char* module) {
    return module_class.starts_with(concat("torch.nn.modules.", module, "."));
  };
  const auto sizes_of = [&](const char* sibling) {
    const auto sizes = modules.sizes.find(parts.sibling(sibling));
    return sizes == modules.sizes.end() ? Sizes() : sizes->second;
  };
  const auto fill = [&](double value) {
    values.fill_(value);
    return true;
  };
  const auto uniform = [&](double bound) {
    values.uniform_(-bound, bound);
    return true;
  };
  if (is_in("linear") || is_in("conv")) {
    const Sizes weight = sizes_of("weight");
    if (weight.size() < 2 || (member != "weight" && member != "bias")) return false;
    const bool is_bilinear = module_class.ends_with(".Bilinear");
    return uniform(1 / std::sqrt(is_bilinear ? static_cast<double>(weight[1]) : inputs_of(weight)));
  }
  if (is_in("sparse")) {
    if (member != "weight") return false;
    values.normal_();
    if (const auto row = modules.padding.find(name); row != modules.padding.end()) values[row->second].zero_();
    return true;
  }
  if (is_in("normalization") || is_in("batchnorm") || is_in("instancenorm")) {
    if (member == "weight" || member == "running_var") return fill(1);
    if (member == "bias" || member == "running_mean" || member == "num_batches_tracked") return fill(0);
    return false;
  }
  if (is_in("rnn")) {
    Sizes recurrent = sizes_of("weight_hh_l0");
    if (recurrent.empty()) recurrent = sizes_of("weight_hh");
    const auto is_a = [&](const char* type) { return module_class.find(type) != std::string::npos; };
    const int gates = is_a(".LSTM") ? 4 : is_a(".GRU") ? 3 : 1;
    return recurrent.size() == 2 && uniform(1 / std::sqrt(static_cast<double>(recurrent[0]) / gates));
  }
  if (is_in("activation")) {
    if (module_class.ends_with(".PReLU")) return fill(0.25);
    if (member == "in_proj_bias") return fill(0);
    if (member == "bias_k" || member == "bias_v") {
      values.normal_(0, 1 / std::sqrt(static_cast<double>(values.size(-1))));
      return true;
    }
    if (!member.ends_with("_proj_weight") || values.dim() != 2) return false;
    return uniform(std::sqrt(6.0 / static_cast<double>(values.size(0) + values.size(1))));
  }
  return false;
}

}  // namespace

WeightName::WeightName(const std::string& name) {
  const std::size_t dot = name.rfind('.');
  module = dot == std::string::npos ? "" : name.substr(0, dot);
  member = dot == std::string::npos ? name : name.substr(dot + 1);
}

std::string WeightName::sibling(const std::string& other) const {
  return module.empty() ? other : concat(module, ".", other);
}

std::int64_t place_of(std::string_view name) {
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (const char character : name) {
    hash ^= static_cast<unsigned char>(character);
    hash *= 0x100000001b3U;
  }
  return static_cast<std::int64_t>(hash);
}

}  // namespace penstock::internal

namespace penstock {

InitialValues initial_values_of_modules(const Program& program) {
  internal::Modules modules;
  modules.program = program.name();
  modules.padding = internal::padding_rows(program);
  for (const ModuleCall& call : program.graph().calls) modules.classes.emplace(call.path, call.type);
  for (const WeightInfo& weight : program.weights()) {
    for (const std::string& name : weight.names) modules.sizes.emplace(name, weight.sizes);
  }
  return [modules = std::move(modules)](const std::string& name, at::Tensor& values) {
    if (internal::set_as_module_does(modules, name, values)) return;
    const auto found = modules.classes.find(internal::WeightName(name).module);
    throw ProgramError(internal::concat(
        modules.program, ": '", name, "' has no initial values, as ",
        found == modules.classes.end() || found->second.empty() ? "it belongs to no module that is called"
                                                                : internal::concat("its module is a ", found->second),
        values.requires_grad() ? ".\n  Hint: choose a standard deviation for such weights, with a function for "
                                 "Program::initialise, or give their values."
                               : ".\n  Hint: give the values of buffers."));
  };
}

}  // namespace penstock
