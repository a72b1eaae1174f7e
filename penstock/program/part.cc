#include "penstock/program/part.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>

#include <algorithm>
#include <string>

#include "penstock/program/error.h"

namespace penstock {
namespace {

bool is_written(const std::vector<Part::Write>& writes, int value) {
  return std::any_of(writes.begin(), writes.end(), [&](const Part::Write& write) { return write.value == value; });
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
      writes_(contents.writes),
      outputs_(contents.outputs.size()),
      code_(code_of(std::move(graph), contents, written_)) {}

std::vector<c10::IValue> Part::run(std::vector<c10::IValue> inputs) const {
  std::vector<at::Tensor> targets;
  auto next_written = written_.begin();
  for (const Write& write : writes_) {
    targets.push_back(write.value >= 0 ? *next_written++ : inputs[static_cast<std::size_t>(write.input)].toTensor());
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
