// Splits arguments into microbatches, and merges the outputs of microbatches. Both work leaf by leaf, according to a
// spec (chunk_spec.h). Without a spec, tensors and block masks are split along dimension 0 and all other leaves are
// replicated. The functions are thread-safe.
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

// Debug mode, as in torch.distributed.pipelining: a chunk is the whole tensor with all but the chunk's rows zeroed, and
// merging takes each chunk's rows. Applies to the whole process.
void set_debug_mask_minibatches(bool on);
bool debug_mask_minibatches();

using Args = std::vector<c10::IValue>;
using Kwargs = std::map<std::string, c10::IValue>;

// Return the arguments as one value: a tuple, or a dict with string keys.
c10::IValue to_value(const Args& args);
c10::IValue to_value(const Kwargs& kwargs);

// The arguments of each chunk. Both vectors have one element for each chunk.
struct SplitArgs {
  std::vector<Args> args;
  std::vector<Kwargs> kwargs;
};

// Splits arguments into `chunks`, or into fewer if the smallest dimension that is split has a smaller size; the sizes
// of the result tell. Chunks of tensors are views, of which the first size % chunks are longer by one. A chunk of a
// leaf tensor that requires grad has its own .grad. Writing into a chunk changes the whole tensor. If the whole does
// not require grad, as is usual for data, autograd sees the write in the graph of that chunk alone, so that a stage may
// modify its input in place. Throws ChunkError.
SplitArgs split_args_kwargs_into_chunks(const Args& args, const Kwargs& kwargs, std::int64_t chunks,
                                        const std::optional<c10::IValue>& args_spec = std::nullopt,
                                        const std::optional<c10::IValue>& kwargs_spec = std::nullopt);

// Merges chunks into one value. Without a spec, all leaves are concatenated along dimension 0. Throws ChunkError.
c10::IValue merge_chunks(const std::vector<c10::IValue>& chunks, const std::optional<c10::IValue>& spec = std::nullopt);

// Throws the ChunkError that merge_chunks would throw, but does not merge. Reducers are not called.
void require_mergeable(const std::vector<c10::IValue>& chunks, const std::optional<c10::IValue>& spec = std::nullopt);

}  // namespace penstock
