// Microbatches: arguments split into chunks, and outputs merged from them, leaf by leaf as a spec says. Without a spec,
// tensors and block masks are split along dimension 0 and all else is replicated.
//
//   auto [args, kwargs] = split_args_kwargs_into_chunks({x, 0.5}, {}, 4);
//   c10::IValue whole = merge_chunks(outputs, c10::ivalue::Tuple::create({TensorChunkSpec(0), Replicate()}));
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "penstock/tensor/chunk_spec.h"

namespace penstock {

// For debugging: a chunk is a whole tensor with all but the chunk zeroed. Merging then takes each chunk's own part.
void set_debug_mask_minibatches(bool on);
bool debug_mask_minibatches();

using Args = std::vector<c10::IValue>;
using Kwargs = std::map<std::string, c10::IValue>;

// A tuple of all arguments, and a dict.
c10::IValue to_value(const Args& args);
c10::IValue to_value(const Kwargs& kwargs);

struct SplitArgs {
  std::vector<Args> args;
  std::vector<Kwargs> kwargs;
};

// Splits arguments into `chunks`, or into as many as the smallest split dimension has, if that is fewer: the caller sees
// it in the sizes of the result. Chunks of tensors are views; the first size % chunks of them are longer by one. Chunks
// of a leaf that requires grad have their own .grad beside it. What is written into a chunk changes the whole, and if
// the whole requires no grad, as data does not, concerns the graph of that chunk alone. Throws ChunkError.
SplitArgs split_args_kwargs_into_chunks(const Args& args, const Kwargs& kwargs, std::int64_t chunks,
                                        const std::optional<c10::IValue>& args_spec = std::nullopt,
                                        const std::optional<c10::IValue>& kwargs_spec = std::nullopt);

// Merges chunks into one value; without a spec all leaves are joined along dimension 0. Throws ChunkError.
c10::IValue merge_chunks(const std::vector<c10::IValue>& chunks, const std::optional<c10::IValue>& spec = std::nullopt);

// Throws the ChunkError that merge_chunks would throw, without joining anything. Reducers are not called.
void require_mergeable(const std::vector<c10::IValue>& chunks, const std::optional<c10::IValue>& spec = std::nullopt);

}  // namespace penstock
