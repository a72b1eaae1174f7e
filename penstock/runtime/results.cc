#include "penstock/runtime/results.h"

#include <ATen/core/List.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>
#include <utility>

#include "penstock/device/host_copies.h"
#include "penstock/device/streams.h"
#include "penstock/tensor/microbatch.h"
#include "penstock/tensor/nested.h"

namespace penstock::internal {
namespace {

using c10::ivalue::Tuple;

// Returns the value with its tensors in CPU memory. The devices of other processes have other numbers.
c10::IValue on_host(const c10::IValue& value, Deadline deadline) {
  HostCopies copies;
  c10::IValue result = map_leaves(value, [&](const c10::IValue& leaf) {
    return leaf.isTensor() ? c10::IValue(copies.start(leaf.toTensor())) : leaf;
  });
  if (copies.wait(deadline)) return result;
  throw TransportError(TransportError::Why::Timeout, TransportError::kNoPeer,
                       "a device has not computed the results within the deadline");
}

// Returns no bytes if the rank has no results.
std::vector<char> encode(const StepOutputs& results, Deadline deadline) {
  std::vector<c10::IValue> outputs;
  if (results.has_outputs) outputs = results.outputs;
  std::vector<c10::IValue> losses;
  for (const at::Tensor& loss : results.losses) {
    if (loss.defined()) losses.emplace_back(loss);
  }
  std::vector<c10::IValue> terms;
  for (std::size_t i = 0; i < results.loss_terms.size(); ++i) {
    for (const auto& [stage, tensors] : results.loss_terms[i]) {
      terms.emplace_back(Tuple::create({static_cast<std::int64_t>(i), stage, tensors}));
    }
  }
  if (outputs.empty() && losses.empty() && terms.empty()) return {};
  const c10::IValue all(Tuple::create({Tuple::create(outputs), Tuple::create(losses), Tuple::create(terms)}));
  return torch::jit::pickle_save(on_host(all, deadline));
}

void decode(const std::vector<char>& bytes, StepOutputs& results) {
  const c10::IValue value = torch::jit::pickle_load(bytes);
  const auto& parts = value.toTupleRef().elements();
  const auto& outputs = parts[0].toTupleRef().elements();
  const auto& losses = parts[1].toTupleRef().elements();
  results.has_outputs = results.has_outputs || !outputs.empty();
  for (std::size_t i = 0; i < outputs.size(); ++i) results.outputs.at(i) = outputs[i];
  for (std::size_t i = 0; i < losses.size(); ++i) results.losses.at(i) = losses[i].toTensor();
  for (const c10::IValue& encoded : parts[2].toTupleRef().elements()) {
    const auto& term = encoded.toTupleRef().elements();
    const auto microbatch = static_cast<std::size_t>(term[0].toInt());
    results.loss_terms.at(microbatch)[static_cast<int>(term[1].toInt())] = term[2].toTensorVector();
  }
}

// The streams of ranks have allocated the results; the caller uses and frees them at any time.
void use_on_stream_of_caller(const StepOutputs& results) {
  for (const c10::IValue& output : results.outputs) {
    for (const at::Tensor& tensor : extract_tensor_args(output)) use_on_stream(tensor);
  }
  for (const at::Tensor& loss : results.losses) use_on_stream(loss);
  for (const auto& by_stage : results.loss_terms) {
    for (const auto& [stage, terms] : by_stage) {
      for (const at::Tensor& term : terms) use_on_stream(term);
    }
  }
}

}  // namespace

void share_results(StepOutputs& outputs, Group& replica_group, Deadline deadline) {
  const std::vector<char> local = encode(outputs, deadline);
  at::Tensor sizes = at::empty({replica_group.size()}, at::kLong);
  replica_group.all_gather(sizes, at::full({1}, static_cast<std::int64_t>(local.size()), at::kLong))->wait(deadline);
  for (int member = 0; member < replica_group.size(); ++member) {
    const auto size = sizes[member].item<std::int64_t>();
    if (size == 0) continue;
    at::Tensor message = at::empty({size}, at::kByte);
    if (member == replica_group.member()) std::memcpy(message.data_ptr(), local.data(), local.size());
    replica_group.broadcast({message}, member)->wait(deadline);
    if (member == replica_group.member()) continue;
    const char* bytes = static_cast<const char*>(message.const_data_ptr());
    decode({bytes, bytes + size}, outputs);
  }
}

StepResult take_results(std::vector<ReplicaStep>& replicas, const std::optional<c10::IValue>& output_merge_spec) {
  StepResult result;
  std::vector<c10::IValue> outputs;
  for (ReplicaStep& replica : replicas) {
    StepOutputs& found = replica.outputs;
    use_on_stream_of_caller(found);
    if (found.has_outputs) std::move(found.outputs.begin(), found.outputs.end(), std::back_inserter(outputs));
    if (found.losses.front().defined()) {
      std::move(found.losses.begin(), found.losses.end(), std::back_inserter(result.losses));
    }
    const std::vector<double>& weights = replica.inputs.weights.weights;
    result.weights.insert(result.weights.end(), weights.begin(), weights.end());
    for (auto& by_stage : found.loss_terms) {
      std::vector<at::Tensor>& terms = result.loss_terms.emplace_back();
      for (auto& [stage, tensors] : by_stage) terms.insert(terms.end(), tensors.begin(), tensors.end());
    }
  }
  if (!outputs.empty()) result.output = merge_chunks(outputs, output_merge_spec);
  return result;
}

}  // namespace penstock::internal
