#include "penstock/runtime/batch.h"

#include <cstddef>
#include <unordered_set>
#include <utility>

#include "penstock/runtime/error.h"
#include "penstock/stage/borrowed.h"
#include "penstock/tensor/nested.h"

namespace penstock {
namespace {

std::optional<c10::IValue> kwargs_spec(const BatchSpecs& specs, int stage) {
  if (stage == 0) return specs.kwargs;
  const auto found = specs.stage_kwargs.find(stage);
  return found == specs.stage_kwargs.end() ? std::nullopt : std::optional(found->second);
}

}  // namespace

std::vector<Batch> split_batch(const Batch& batch, const BatchSpecs& specs, int count, const std::string& parts) {
  std::vector<Batch> result(static_cast<std::size_t>(count));
  const auto require_all = [&](std::size_t found, const std::string& what) {
    if (found == result.size()) return;
    const std::string number = std::to_string(count);
    throw PipelineError(what + " can be split into " + std::to_string(found) + " only, and there are " + number + " " +
                        parts + ".\n  Hint: give at least " + number + " rows, or take fewer " + parts + ".");
  };
  SplitArgs args = split_args_kwargs_into_chunks(batch.args, {}, count, specs.args);
  require_all(args.args.size(), "the arguments");
  for (std::size_t i = 0; i < result.size(); ++i) result[i].args = std::move(args.args[i]);

  for (const auto& [stage, kwargs] : batch.kwargs) {
    if (kwargs.empty() && !kwargs_spec(specs, stage)) continue;
    SplitArgs split = split_args_kwargs_into_chunks({}, kwargs, count, std::nullopt, kwargs_spec(specs, stage));
    require_all(split.kwargs.size(), "the keyword arguments of stage " + std::to_string(stage));
    for (std::size_t i = 0; i < result.size(); ++i) result[i].kwargs[stage] = std::move(split.kwargs[i]);
  }

  if (batch.target.isNone()) return result;
  std::optional<c10::IValue> spec;
  if (specs.target) spec = c10::ivalue::Tuple::create({*specs.target});
  SplitArgs targets = split_args_kwargs_into_chunks({batch.target}, {}, count, spec);
  require_all(targets.args.size(), "the target");
  for (std::size_t i = 0; i < result.size(); ++i) result[i].target = std::move(targets.args[i][0]);
  return result;
}

void borrow_chunks(std::vector<Batch>& parts, const Batch& batch) {
  std::unordered_set<const void*> replicated;
  const auto add = [&](const c10::IValue& value) {
    for (const at::Tensor& tensor : extract_tensor_args(value)) replicated.insert(tensor.unsafeGetTensorImpl());
  };
  add(to_value(batch.args));
  for (const auto& [stage, kwargs] : batch.kwargs) add(to_value(kwargs));
  add(batch.target);

  const auto borrow_all = [&](c10::IValue& value) {
    value = map_leaves(value, [&](const c10::IValue& leaf) -> c10::IValue {
      if (!leaf.isTensor() || !leaf.toTensor().defined()) return leaf;
      const at::Tensor& tensor = leaf.toTensor();
      return replicated.contains(tensor.unsafeGetTensorImpl()) ? tensor : borrow_chunk(tensor);
    });
  };
  for (Batch& part : parts) {
    for (c10::IValue& arg : part.args) borrow_all(arg);
    for (auto& [stage, kwargs] : part.kwargs) {
      for (auto& [name, value] : kwargs) borrow_all(value);
    }
    borrow_all(part.target);
  }
}

}  // namespace penstock
