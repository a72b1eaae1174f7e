#include "penstock/runtime/batch.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>

#include <algorithm>
#include <cstddef>
#include <unordered_set>
#include <utility>

#include "penstock/runtime/error.h"
#include "penstock/stage/copy_on_write.h"
#include "penstock/tensor/nested.h"

namespace penstock {
namespace {

std::optional<c10::IValue> kwargs_spec(const BatchSpecs& specs, int stage) {
  if (stage == 0) return specs.kwargs;
  const auto found = specs.stage_kwargs.find(stage);
  return found == specs.stage_kwargs.end() ? std::nullopt : std::optional(found->second);
}

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

// The tensors of the first stage's arguments that have rows, by their names in errors.
std::vector<NamedTensor> tensors_with_rows(const Batch& batch) {
  std::vector<NamedTensor> tensors;
  const auto add = [&](const c10::IValue& leaf, const Path& path) {
    if (leaf.isTensor() && leaf.toTensor().defined() && leaf.toTensor().dim() > 0) {
      tensors.push_back({path.text(), leaf.toTensor()});
    }
  };
  for_each_leaf(to_value(batch.args), Path("args"), add);
  const auto kwargs = batch.kwargs.find(0);
  if (kwargs != batch.kwargs.end()) for_each_leaf(to_value(kwargs->second), Path("kwargs"), add);
  return tensors;
}

std::string described(const std::string& name, const at::Tensor& tensor) {
  return name + " (" + describe(tensor) + ")";
}

// A target that is the list of its own row numbers, 0, 1, 2, …: the loss uses it to tell microbatches apart, and compares
// nothing with it.
bool is_numbering(const at::Tensor& target) {
  return target.dim() == 1 && target.scalar_type() == at::kLong &&
         at::equal(target, at::arange(target.size(0), target.options()));
}

// Without specs, a microbatch has the same rows of the target as of an argument, or the same multiple of them where the
// target was flattened. Anything else would compare outputs with targets of other rows.
void require_rows_fit(const Batch& batch, const BatchSpecs& specs, int count, const std::string& parts) {
  if (specs.target || !batch.target.isTensor() || !batch.target.toTensor().defined()) return;
  const at::Tensor& target = batch.target.toTensor();
  if (target.dim() == 0) {
    throw PipelineError(described("the target", target) + " has no rows, and cannot be split into " +
                        std::to_string(count) + " " + parts + ".\n  Hint: give a target for each row.");
  }
  if (specs.args || specs.kwargs) return;
  const std::int64_t rows = target.size(0);
  const std::vector<NamedTensor> tensors = tensors_with_rows(batch);
  const auto fits = [&](const NamedTensor& argument) {
    const std::int64_t others = argument.tensor.size(0);
    // A multiple is split in the same places only if each part has a whole number of it.
    return others > 0 && (rows == others || (rows > others && rows % others == 0 && others % count == 0));
  };
  if (tensors.empty() || std::ranges::any_of(tensors, fits) || is_numbering(target)) return;
  throw PipelineError(described("the target", target) + " has " + std::to_string(rows) + " rows, and " +
                      described(tensors.front().name, tensors.front().tensor) + " has " +
                      std::to_string(tensors.front().tensor.size(0)) + ": they cannot be split into the same " + parts +
                      ".\n  Hint: give a target for each row, or say how this one is split.");
}

}  // namespace

std::int64_t rows_of(const Batch& batch) {
  const std::vector<NamedTensor> tensors = tensors_with_rows(batch);
  std::int64_t rows = tensors.empty() ? 1 : 0;
  for (const NamedTensor& argument : tensors) rows = std::max(rows, argument.tensor.size(0));
  return rows;
}

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
  require_rows_fit(batch, specs, count, parts);
  std::optional<c10::IValue> spec;
  if (specs.target) spec = c10::ivalue::Tuple::create({*specs.target});
  SplitArgs targets = split_args_kwargs_into_chunks({batch.target}, {}, count, spec);
  require_all(targets.args.size(), "the target");
  for (std::size_t i = 0; i < result.size(); ++i) result[i].target = std::move(targets.args[i][0]);
  return result;
}

void alias_chunks(std::vector<Batch>& parts, const Batch& batch) {
  std::unordered_set<const void*> replicated;
  const auto add = [&](const c10::IValue& value) {
    for (const at::Tensor& tensor : extract_tensor_args(value)) replicated.insert(tensor.unsafeGetTensorImpl());
  };
  add(to_value(batch.args));
  for (const auto& [stage, kwargs] : batch.kwargs) add(to_value(kwargs));
  add(batch.target);

  const auto alias_all = [&](c10::IValue& value) {
    value = map_leaves(value, [&](const c10::IValue& leaf) -> c10::IValue {
      if (!leaf.isTensor() || !leaf.toTensor().defined()) return leaf;
      const at::Tensor& tensor = leaf.toTensor();
      return replicated.contains(tensor.unsafeGetTensorImpl()) ? tensor : copy_on_write_chunk(tensor);
    });
  };
  for (Batch& part : parts) {
    for (c10::IValue& arg : part.args) alias_all(arg);
    for (auto& [stage, kwargs] : part.kwargs) {
      for (auto& [name, value] : kwargs) alias_all(value);
    }
    alias_all(part.target);
  }
}

}  // namespace penstock
