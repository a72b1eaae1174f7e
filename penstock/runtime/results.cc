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

#include "penstock/tensor/microbatch.h"

namespace penstock::internal {
namespace {

using c10::ivalue::Tuple;

// Nothing when a rank has nothing.
std::vector<char> encode(const StepWork& work) {
  std::vector<c10::IValue> outputs;
  if (work.has_outputs) outputs = work.outputs;
  std::vector<c10::IValue> losses;
  for (const at::Tensor& loss : work.losses) {
    if (loss.defined()) losses.emplace_back(loss);
  }
  std::vector<c10::IValue> terms;
  for (std::size_t i = 0; i < work.loss_terms.size(); ++i) {
    for (const auto& [stage, own] : work.loss_terms[i]) {
      terms.emplace_back(Tuple::create({static_cast<std::int64_t>(i), stage, own}));
    }
  }
  if (outputs.empty() && losses.empty() && terms.empty()) return {};
  return torch::jit::pickle_save(Tuple::create({Tuple::create(outputs), Tuple::create(losses), Tuple::create(terms)}));
}

void decode(const std::vector<char>& bytes, StepWork& work) {
  const c10::IValue value = torch::jit::pickle_load(bytes);
  const auto& parts = value.toTupleRef().elements();
  const auto& outputs = parts[0].toTupleRef().elements();
  const auto& losses = parts[1].toTupleRef().elements();
  work.has_outputs = work.has_outputs || !outputs.empty();
  for (std::size_t i = 0; i < outputs.size(); ++i) work.outputs.at(i) = outputs[i];
  for (std::size_t i = 0; i < losses.size(); ++i) work.losses.at(i) = losses[i].toTensor();
  for (const c10::IValue& one : parts[2].toTupleRef().elements()) {
    const auto& term = one.toTupleRef().elements();
    const auto microbatch = static_cast<std::size_t>(term[0].toInt());
    work.loss_terms.at(microbatch)[static_cast<int>(term[1].toInt())] = term[2].toTensorVector();
  }
}

}  // namespace

void share_results(StepWork& work, Group& ranks, Deadline deadline) {
  const std::vector<char> own = encode(work);
  at::Tensor sizes = at::empty({ranks.size()}, at::kLong);
  ranks.all_gather(sizes, at::full({1}, static_cast<std::int64_t>(own.size()), at::kLong))->wait(deadline);
  for (int member = 0; member < ranks.size(); ++member) {
    const auto size = sizes[member].item<std::int64_t>();
    if (size == 0) continue;
    at::Tensor message = at::empty({size}, at::kByte);
    if (member == ranks.member()) std::memcpy(message.data_ptr(), own.data(), own.size());
    ranks.broadcast({message}, member)->wait(deadline);
    if (member == ranks.member()) continue;
    const char* bytes = static_cast<const char*>(message.const_data_ptr());
    decode({bytes, bytes + size}, work);
  }
}

StepResult take_results(std::vector<StepWork>& works, const std::optional<c10::IValue>& output_merge_spec) {
  StepResult result;
  std::vector<c10::IValue> outputs;
  for (StepWork& work : works) {
    if (work.has_outputs) std::move(work.outputs.begin(), work.outputs.end(), std::back_inserter(outputs));
    if (work.losses.front().defined()) {
      std::move(work.losses.begin(), work.losses.end(), std::back_inserter(result.losses));
    }
    result.weights.insert(result.weights.end(), work.loss_weights.begin(), work.loss_weights.end());
    for (auto& by_stage : work.loss_terms) {
      std::vector<at::Tensor>& terms = result.loss_terms.emplace_back();
      for (auto& [stage, own] : by_stage) terms.insert(terms.end(), own.begin(), own.end());
    }
  }
  if (!outputs.empty()) result.output = merge_chunks(outputs, output_merge_spec);
  return result;
}

}  // namespace penstock::internal
