// What becomes of each leaf when arguments are split into chunks, and when chunks are merged.
//
// A spec is a value of the same structure as what it is for, with a TensorChunkSpec, Replicate or a reducer for each
// leaf.
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

// For merging: a fold over the chunks in their order. Copies of a reducer are equal, as they are one and the same.
class CustomReducer {
 public:
  using Reduce = std::function<c10::IValue(const c10::IValue& so_far, const c10::IValue& chunk)>;

  CustomReducer(c10::IValue init_value, Reduce reduce);

  const c10::IValue& init_value() const { return parts_->init_value; }
  c10::IValue reduce(const c10::IValue& so_far, const c10::IValue& chunk) const {
    return parts_->reduce(so_far, chunk);
  }

  operator c10::IValue() const;  // NOLINT(google-explicit-constructor): specs stand in tuples and dicts
  friend bool operator==(const CustomReducer&, const CustomReducer&) = default;

 private:
  struct Parts {
    c10::IValue init_value;
    Reduce reduce;
  };
  std::shared_ptr<const Parts> parts_;
};

// A reducer of losses.
class LossReducer : public CustomReducer {
 public:
  using CustomReducer::CustomReducer;
};

// The sum of tensors or numbers, from 0.0; a tensor.
const CustomReducer& sum_reducer();

// "TensorChunkSpec(0)", "Replicate()", or the structure with these inside.
std::string spec_text(const c10::IValue& spec);
// Whether two specs say the same.
bool equal_specs(const c10::IValue& one, const c10::IValue& other);

// The spec that a leaf of a spec is; null for anything else.
using ChunkSpec = std::variant<TensorChunkSpec, Replicate, CustomReducer>;
const ChunkSpec* chunk_spec_of(const c10::IValue& leaf);

}  // namespace penstock
