// A batch, and how it is split: first among replicas, then into microbatches.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "penstock/tensor/microbatch.h"

namespace penstock {

// Specs that tell how each value of a batch is split. If unset, tensors are split along dimension 0, and other values
// are replicated.
struct BatchSpecs {
  std::optional<c10::IValue> args = std::nullopt;
  std::optional<c10::IValue> kwargs = std::nullopt;
  // Keyword arguments of later stages, by stage.
  std::map<int, c10::IValue> stage_kwargs = {};
  std::optional<c10::IValue> target = std::nullopt;
};

struct Batch {
  // Arguments of the first stage.
  Args args;
  // Keyword arguments by stage.
  std::map<int, Kwargs> kwargs;
  // None without a target. An undefined tensor is the target of a loss that takes none.
  c10::IValue target;
  // Source of the batch, such as a file, for error messages; may be empty.
  std::string name = {};
};

// Returns the number of rows of a batch: the largest dimension 0 of the arguments of its first stage, and 1 if none has
// dimensions.
std::int64_t rows_of(const Batch& batch);

// Splits a batch into `count` parts, which errors call `parts`, such as "microbatches". Tensors of the parts are views
// of those of the batch. Throws ChunkError for a value that cannot be split, and PipelineError for one with too few
// rows.
std::vector<Batch> split_batch(const Batch& batch, const BatchSpecs& specs, int count, const std::string& parts);

}  // namespace penstock
