// A batch, and its parts: one for each replica, and of those one for each microbatch.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "penstock/tensor/microbatch.h"

namespace penstock {

// How each of its values is split; left out: tensors along dimension 0, all else is repeated.
struct BatchSpecs {
  std::optional<c10::IValue> args = std::nullopt;
  std::optional<c10::IValue> kwargs = std::nullopt;
  // Of later stages.
  std::map<int, c10::IValue> stage_kwargs = {};
  std::optional<c10::IValue> target = std::nullopt;
};

struct Batch {
  // Of the first stage.
  Args args;
  // By stage.
  std::map<int, Kwargs> kwargs;
  // None if none was given. An undefined tensor is the target of a loss that takes none.
  c10::IValue target;
  // Where the batch comes from, such as a file: errors name it. Empty for none.
  std::string name = {};
};

// Number of rows of a batch: the largest dimension 0 of the arguments of its first stage, and 1 if none has dimensions.
std::int64_t rows_of(const Batch& batch);

// `count` parts, which errors call `parts`, such as "microbatches". Throws ChunkError for what cannot be split, and
// PipelineError, by name, for what has too few rows.
std::vector<Batch> split_batch(const Batch& batch, const BatchSpecs& specs, int count, const std::string& parts);

// Replaces the chunks of tensors, which are views of the batch that was split, by aliases that are copied when somebody
// writes into them: a stage may, and neither the caller's batch nor the graph of another microbatch notices. What was
// replicated stays one tensor for all parts.
void alias_chunks(std::vector<Batch>& parts, const Batch& batch);

}  // namespace penstock
