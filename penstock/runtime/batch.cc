#include "penstock/runtime/batch.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>

#include <algorithm>
#include <cstddef>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/runtime/error.h"
#include "penstock/tensor/nested.h"

namespace penstock {

using internal::concat;

namespace {

std::optional<c10::IValue> kwargs_spec(const BatchSpecs& specs, int stage) {
  if (stage == 0) return specs.kwargs;
  const auto found = specs.stage_kwargs.find(stage);
  return found == specs.stage_kwargs.end() ? std::nullopt : std::optional(found->second);
}

struct NamedArgument {
  std::string name;
  at::Tensor tensor;
};

// Returns the tensors of the first stage's arguments that have rows, with their names for errors.
std::vector<NamedArgument> tensors_with_rows(const Batch& batch) {
  std::vector<NamedArgument> tensors;
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
  return concat(name, " (", describe(tensor), ")");
}

// Returns true for a target that is the list of its own row numbers, 0, 1, 2, …: the loss uses it to tell microbatches
// apart, and compares nothing with it.
bool is_numbering(const at::Tensor& target) {
  return target.dim() == 1 && target.scalar_type() == at::kLong &&
         at::equal(target, at::arange(target.size(0), target.options()));
}

// Throws PipelineError if the rows of the target do not match those of the arguments. Without specs, a microbatch gets
// the same rows of the target as of an argument, or the same multiple of them if the target was flattened. Anything
// else would compare outputs with targets of other rows.
void require_rows_fit(const Batch& batch, const BatchSpecs& specs, int count, const std::string& parts) {
  if (specs.target || !batch.target.isTensor() || !batch.target.toTensor().defined()) return;
  const at::Tensor& target = batch.target.toTensor();
  if (target.dim() == 0) {
    throw PipelineError(concat(described("the target", target), " has no rows, and cannot be split into ", count, " ",
                               parts, ".\n  Hint: give a target for each row."));
  }
  if (specs.args || specs.kwargs) return;
  const std::int64_t rows = target.size(0);
  const std::vector<NamedArgument> tensors = tensors_with_rows(batch);
  const auto fits = [&](const NamedArgument& argument) {
    const std::int64_t others = argument.tensor.size(0);
    // A multiple is split in the same places only if each part has a whole number of it.
    return others > 0 && (rows == others || (rows > others && rows % others == 0 && others % count == 0));
  };
  if (tensors.empty() || std::ranges::any_of(tensors, fits) || is_numbering(target)) return;
  throw PipelineError(concat(described("the target", target), " has ", rows, " rows, and ",
                             described(tensors.front().name, tensors.front().tensor), " has ",
                             tensors.front().tensor.size(0), ": they cannot be split into the same ", parts,
                             ".\n  Hint: give a target for each row, or say how this one is split."));
}

}  // namespace

std::int64_t rows_of(const Batch& batch) {
  const std::vector<NamedArgument> tensors = tensors_with_rows(batch);
  std::int64_t rows = tensors.empty() ? 1 : 0;
  for (const NamedArgument& argument : tensors) rows = std::max(rows, argument.tensor.size(0));
  return rows;
}

std::vector<Batch> split_batch(const Batch& batch, const BatchSpecs& specs, int count, const std::string& parts) {
  std::vector<Batch> result(static_cast<std::size_t>(count));
  const auto require_all = [&](std::size_t found, const std::string& what) {
    if (found == result.size()) return;
    throw PipelineError(concat(what, " can be split into ", found, " only, and there are ", count, " ", parts,
                               ".\n  Hint: give at least ", count, " rows, or take fewer ", parts, "."));
  };
  SplitArgs args = split_args_kwargs_into_chunks(batch.args, {}, count, specs.args);
  require_all(args.args.size(), "the arguments");
  for (std::size_t i = 0; i < result.size(); ++i) result[i].args = std::move(args.args[i]);

  for (const auto& [stage, kwargs] : batch.kwargs) {
    if (kwargs.empty() && !kwargs_spec(specs, stage)) continue;
    SplitArgs split = split_args_kwargs_into_chunks({}, kwargs, count, std::nullopt, kwargs_spec(specs, stage));
    require_all(split.kwargs.size(), concat("the keyword arguments of stage ", stage));
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

}  // namespace penstock
