#include "penstock/program/interpreter/subgraph.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>

#include <algorithm>
#include <string>

#include "penstock/program/error.h"
#include "penstock/program/interpreter/mode.h"

namespace penstock::internal {
namespace {

// What nodes write to in place is written at the end, like what comes out of the program for it.
void add_writes_in_place(const Exported& exported, Part::Contents& contents) {
  const Graph& graph = exported.graph;
  const Effects& effects = exported.effects;
  for (const int number : contents.nodes) {
    const bool in_training_only = evaluation_change(graph, graph.nodes[static_cast<std::size_t>(number)]).has_value();
    for (const int value : effects.writes[static_cast<std::size_t>(number)]) {
      const int root = effects.root_of(value);
      Part::Write write{.operand = {.value = root}, .in_training_only = in_training_only};
      const auto input = std::ranges::find(contents.inputs, root);
      const auto held = std::ranges::find(contents.held, root, &std::pair<int, at::Tensor>::first);
      if (input != contents.inputs.end() && contents.inputs_are_given) {
        write.input = static_cast<int>(input - contents.inputs.begin());
      } else if (held != contents.held.end()) {
        write.value = root;
      } else {
        continue;
      }
      const auto known = std::ranges::find_if(contents.writes, [&](const Part::Write& one) {
        return one.value == write.value && one.input == write.input;
      });
      if (known == contents.writes.end()) {
        contents.writes.push_back(write);
      } else {
        known->in_training_only = known->in_training_only && in_training_only;
      }
    }
  }
}

// What is written to comes in as an input, in the order of the writes; what is written goes out behind the outputs.
Code code_of(const std::shared_ptr<const Exported>& exported, Part::Contents& contents,
             std::vector<at::Tensor>& written) {
  add_writes_in_place(*exported, contents);
  std::vector<int> inputs = contents.inputs;
  std::vector<Code::Held> held;
  for (const auto& [value, tensor] : contents.held) held.push_back({value, tensor});
  for (const Part::Write& write : contents.writes) {
    const auto target = std::ranges::find(held, write.value, &Code::Held::value);
    if (target == held.end()) continue;
    inputs.push_back(write.value);
    written.push_back(target->content.toTensor());
    held.erase(target);
  }
  std::vector<Operand> outputs = contents.outputs;
  for (const Part::Write& write : contents.writes) outputs.push_back(write.operand);
  return {{exported, &exported->graph}, contents.nodes, inputs, std::move(held), outputs};
}

}  // namespace

Part::Part(const std::shared_ptr<const Exported>& exported, Contents contents, std::shared_ptr<const Code::Mode> mode)
    : mode_(std::move(mode)), outputs_(contents.outputs.size()), code_(code_of(exported, contents, written_)) {
  writes_ = std::move(contents.writes);
}

std::vector<c10::IValue> Part::run(std::vector<c10::IValue> inputs) const {
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
  std::vector<c10::IValue> outputs = code_.run(std::move(inputs), *mode_);
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < writes_.size(); ++i) {
    if (writes_[i].in_training_only && !mode_->training) continue;
    try {
      targets[i].copy_(outputs[outputs_ + i].toTensor());
    } catch (const c10::Error& error) {
      throw ProgramError(std::string("what is written at the end does not fit: ") + error.what_without_backtrace());
    }
  }
  outputs.resize(outputs_);
  return outputs;
}

}  // namespace penstock::internal
