// Microbatches: arguments split into chunks, and outputs merged from them, leaf by leaf as a spec says.
//
// A spec is a value of the same structure as what it is for, with a TensorChunkSpec, Replicate or a reducer for each
// leaf. Without one, tensors and block masks are split along dimension 0 and all else is replicated.
//
//   auto [args, kwargs] = split_args_kwargs_into_chunks({x, 0.5}, {}, 4);
//   c10::IValue whole = merge_chunks(outputs, c10::ivalue::Tuple::create({TensorChunkSpec(0), Replicate()}));
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace penstock {

inline constexpr std::int64_t DEFAULT_CHUNK_DIM = 0;  // NOLINT(readability-identifier-naming): the peer's name

// Arguments that cannot be split, or chunks that cannot be merged, as their spec says. The message names the path to the
// leaf, what was found and what was expected.
class ChunkError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A tensor is split, and merged, along a dimension; a negative one counts from the last.
struct TensorChunkSpec {
  explicit TensorChunkSpec(std::int64_t dim) : split_dim(dim) {}

  // Specs of the structure of a tuple or a dict of dimensions, nested or not.
  static c10::IValue from_tuple(const c10::IValue& dims);
  static c10::IValue from_dict(const c10::IValue& dims);

  operator c10::IValue() const;  // NOLINT(google-explicit-constructor): specs stand in tuples and dicts
  friend bool operator==(const TensorChunkSpec&, const TensorChunkSpec&) = default;

  std::int64_t split_dim;
};

// Every chunk has the whole value; merging checks that all are equal.
struct Replicate {
  operator c10::IValue() const;  // NOLINT(google-explicit-constructor): specs stand in tuples and dicts
  friend bool operator==(const Replicate&, const Replicate&) = default;
};

// For merging: a fold over the chunks in their order.
struct CustomReducer {
  c10::IValue init_value;
  std::function<c10::IValue(const c10::IValue& so_far, const c10::IValue& chunk)> reduce;

  operator c10::IValue() const;  // NOLINT(google-explicit-constructor): specs stand in tuples and dicts
};

// A reducer of losses.
struct LossReducer : CustomReducer {};

// The sum, from 0.0.
const CustomReducer& sum_reducer();

// "TensorChunkSpec(0)", "Replicate()", or the structure with these inside.
std::string spec_text(const c10::IValue& spec);
// Whether two specs say the same; reducers are equal when they are the same object.
bool equal_specs(const c10::IValue& one, const c10::IValue& other);

// For debugging: a chunk is a whole tensor with all but the chunk zeroed. Merging then takes each chunk's own part.
void set_debug_mask_minibatches(bool on);
bool debug_mask_minibatches();

using Args = std::vector<c10::IValue>;
using Kwargs = c10::Dict<std::string, c10::IValue>;

struct SplitArgs {
  std::vector<Args> args;
  std::vector<Kwargs> kwargs;
};

// Splits arguments into `chunks`, or into as many as the smallest split dimension has, if that is fewer: the caller sees
// it in the sizes of the result. Chunks of tensors are views; the first size % chunks of them are longer by one. Chunks
// of a leaf that requires grad keep their own .grad. Throws ChunkError.
SplitArgs split_args_kwargs_into_chunks(const Args& args, const Kwargs& kwargs, std::int64_t chunks,
                                        const std::optional<c10::IValue>& args_spec = std::nullopt,
                                        const std::optional<c10::IValue>& kwargs_spec = std::nullopt);

// Merges chunks into one value; without a spec all leaves are joined along dimension 0. Throws ChunkError.
c10::IValue merge_chunks(const std::vector<c10::IValue>& chunks, const std::optional<c10::IValue>& spec = std::nullopt);

}  // namespace penstock
