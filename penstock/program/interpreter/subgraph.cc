#include "penstock/program/interpreter/subgraph.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>

#include <algorithm>
#include <string>

#include "penstock/base/text.h"
#include "penstock/program/error.h"
#include "penstock/program/interpreter/mode.h"

namespace penstock::internal {
namespace {

// Turns mutations in place into writes at the end of the run, like the mutations that the export has as outputs.
void add_writes_in_place(const ExportedProgram& exported, Subgraph::Contents& contents) {
  const Graph& graph = exported.graph;
  const Effects& effects = exported.effects;
  for (const int number : contents.nodes) {
    const bool in_training_only = evaluation_change(graph, graph.nodes[static_cast<std::size_t>(number)]).has_value();
    for (const int value : effects.writes[static_cast<std::size_t>(number)]) {
      const int root = effects.root_of(value);
      Subgraph::Write write{.operand = {.value = root}, .in_training_only = in_training_only};
      const auto input = std::ranges::find(contents.inputs, root);
      const auto weight = std::ranges::find(contents.weights, root, &std::pair<int, at::Tensor>::first);
      if (input != contents.inputs.end() && contents.inputs_are_given) {
        write.input = static_cast<int>(input - contents.inputs.begin());
      } else if (weight != contents.weights.end()) {
        write.value = root;
      } else {
        continue;
      }
      const auto known = std::ranges::find_if(contents.writes, [&](const Subgraph::Write& other) {
        return other.value == write.value && other.input == write.input;
      });
      if (known == contents.writes.end()) {
        contents.writes.push_back(write);
      } else {
        known->in_training_only = known->in_training_only && in_training_only;
      }
    }
  }
}

// Builds an interpreter that takes the written tensors as additional inputs, in the order of the writes, and returns
// their new content after the outputs.
Interpreter interpreter_of(const std::shared_ptr<const ExportedProgram>& exported, Subgraph::Contents& contents,
                           std::vector<at::Tensor>& written) {
  add_writes_in_place(*exported, contents);
  std::vector<int> inputs = contents.inputs;
  std::vector<Interpreter::Weight> weights;
  for (const auto& [value, tensor] : contents.weights) weights.push_back({value, tensor});
  for (const Subgraph::Write& write : contents.writes) {
    const auto target = std::ranges::find(weights, write.value, &Interpreter::Weight::value);
    if (target == weights.end()) continue;
    inputs.push_back(write.value);
    written.push_back(target->content.toTensor());
    weights.erase(target);
  }
  std::vector<Operand> outputs = contents.outputs;
  for (const Subgraph::Write& write : contents.writes) outputs.push_back(write.operand);
  return {{exported, &exported->graph}, contents.nodes, inputs, std::move(weights), outputs};
}

}  // namespace

Subgraph::Subgraph(const std::shared_ptr<const ExportedProgram>& exported, Contents contents,
                   std::shared_ptr<const Interpreter::Mode> mode)
    : mode_(std::move(mode)),
      outputs_(contents.outputs.size()),
      interpreter_(interpreter_of(exported, contents, written_)) {
  writes_ = std::move(contents.writes);
}

std::vector<c10::IValue> Subgraph::run(std::vector<c10::IValue> inputs) const {
  std::vector<at::Tensor> targets;
  auto next_written = written_.begin();
  for (const Write& write : writes_) {
    if (write.value >= 0) {
      targets.push_back(*next_written++);
      continue;
    }
    c10::IValue& input = inputs[static_cast<std::size_t>(write.input)];
    targets.push_back(input.toTensor());
    input = targets.back().clone();
  }
  for (const at::Tensor& tensor : written_) inputs.emplace_back(tensor.clone());
  std::vector<c10::IValue> outputs = interpreter_.run(std::move(inputs), *mode_);
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < writes_.size(); ++i) {
    if (writes_[i].in_training_only && !mode_->training) continue;
    try {
      targets[i].copy_(outputs[outputs_ + i].toTensor());
    } catch (const c10::Error& error) {
      throw ProgramError(concat("a mutated tensor cannot take its new content: ", error.what_without_backtrace()));
    }
  }
  outputs.resize(outputs_);
  return outputs;
}

}  // namespace penstock::internal
