#include "penstock/program/part.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>

#include <algorithm>
#include <string>

#include "penstock/program/effects.h"
#include "penstock/program/error.h"
#include "penstock/program/mode.h"

namespace penstock {
namespace {

bool is_written(const std::vector<Part::Write>& writes, int value) {
  return std::any_of(writes.begin(), writes.end(), [&](const Part::Write& write) { return write.value == value; });
}

// What nodes write to in place is written at the end, like what comes out of the program for it.
void add_writes_in_place(const Graph& graph, Part::Contents& contents) {
  const Effects effects = effects_of(graph);
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

Code code_of(std::shared_ptr<const Graph> graph, Part::Contents& contents, std::vector<at::Tensor>& written) {
  std::vector<int> inputs = contents.inputs;
  std::vector<Code::Held> held;
  for (Part::Write& write : contents.writes) {
    if (write.value < 0) continue;
    for (auto& [value, tensor] : contents.held) {
      if (value != write.value) continue;
      inputs.push_back(value);
      written.push_back(tensor);
    }
  }
  for (auto& [value, tensor] : contents.held) {
    if (!is_written(contents.writes, value)) held.push_back({value, tensor});
  }
  std::vector<Operand> outputs = contents.outputs;
  for (const Part::Write& write : contents.writes) outputs.push_back(write.operand);
  return {std::move(graph), contents.nodes, inputs, std::move(held), outputs};
}

}  // namespace

Part::Part(std::shared_ptr<const Graph> graph, Contents contents, std::shared_ptr<const Code::Mode> mode)
    : mode_(std::move(mode)),
      outputs_(contents.outputs.size()),
      code_((add_writes_in_place(*graph, contents), code_of(std::move(graph), contents, written_))) {
  writes_ = std::move(contents.writes);
}

std::vector<c10::IValue> Part::run(std::vector<c10::IValue> inputs) const {
  std::vector<at::Tensor> targets;
  auto next_written = written_.begin();
  for (const Write& write : writes_) {
    targets.push_back(write.value >= 0 ? *next_written++ : inputs[static_cast<std::size_t>(write.input)].toTensor());
  }
  for (const Write& write : writes_) {
    if (write.input < 0) continue;
    c10::IValue& input = inputs[static_cast<std::size_t>(write.input)];
    input = input.toTensor().clone();
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

}  // namespace penstock
