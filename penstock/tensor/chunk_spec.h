// Specs, which say how each leaf of a value is split into chunks and merged again. A spec has the same structure as the
// value, with a TensorChunkSpec, Replicate or a reducer in place of each leaf.
//
//   c10::IValue spec = c10::ivalue::Tuple::create({TensorChunkSpec(0), Replicate()});
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <variant>

namespace penstock {

inline constexpr std::int64_t DEFAULT_CHUNK_DIM = 0;  // NOLINT(readability-identifier-naming): PyTorch's name

// Thrown when arguments cannot be split, or chunks cannot be merged, according to their spec. The message has the path
// of the leaf, what was found and what was expected.
class ChunkError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Splits a tensor, and concatenates chunks, along a dimension. A negative dimension counts from the last.
struct TensorChunkSpec {
  explicit TensorChunkSpec(std::int64_t dim) : split_dim(dim) {}

  // Return specs with the structure of a tuple or a dict of dimensions, nested or not. Throw ChunkError if a leaf is
  // not an int.
  static c10::IValue from_tuple(const c10::IValue& dims);
  static c10::IValue from_dict(const c10::IValue& dims);

  operator c10::IValue() const;  // NOLINT(google-explicit-constructor): specs stand in tuples and dicts
  friend bool operator==(const TensorChunkSpec&, const TensorChunkSpec&) = default;

  std::int64_t split_dim;
};

// Gives every chunk the whole value. Merging requires that all chunks are equal.
struct Replicate {
  operator c10::IValue() const;  // NOLINT(google-explicit-constructor): specs stand in tuples and dicts
  friend bool operator==(const Replicate&, const Replicate&) = default;
};

// Merges chunks by a fold in their order: reduce(reduce(init_value, chunk 0), chunk 1), … Copies of a reducer compare
// equal.
class CustomReducer {
 public:
  using Reduce = std::function<c10::IValue(const c10::IValue& so_far, const c10::IValue& chunk)>;

  CustomReducer(c10::IValue init_value, Reduce reduce);

  const c10::IValue& init_value() const { return content_->init_value; }
  c10::IValue reduce(const c10::IValue& so_far, const c10::IValue& chunk) const {
    return content_->reduce(so_far, chunk);
  }

  operator c10::IValue() const;  // NOLINT(google-explicit-constructor): specs stand in tuples and dicts
  friend bool operator==(const CustomReducer&, const CustomReducer&) = default;

 private:
  struct Content {
    c10::IValue init_value;
    Reduce reduce;
  };
  std::shared_ptr<const Content> content_;
};

// A reducer of losses, as torch.distributed.pipelining names it.
class LossReducer : public CustomReducer {
 public:
  using CustomReducer::CustomReducer;
};

// Returns the reducer that sums tensors or numbers, beginning with 0.0. Its result is a tensor.
const CustomReducer& sum_reducer();

// Returns a spec as text: "TensorChunkSpec(0)", "Replicate()", or the structure with these inside.
std::string spec_text(const c10::IValue& spec);
// Returns true if two specs have the same structure and equal leaves.
bool equal_specs(const c10::IValue& first, const c10::IValue& second);

using ChunkSpec = std::variant<TensorChunkSpec, Replicate, CustomReducer>;
// Returns the spec that a leaf holds, or null if it holds none. The pointer is valid as long as the leaf.
const ChunkSpec* chunk_spec_of(const c10::IValue& leaf);

}  // namespace penstock
