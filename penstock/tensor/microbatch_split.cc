#include <ATen/core/Dict.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/tensor/block_mask.h"
#include "penstock/tensor/chunk_range.h"
#include "penstock/tensor/microbatch.h"
#include "penstock/tensor/nested.h"

namespace penstock {

using internal::chunk_range;
using internal::ChunkRange;
using internal::concat;
using internal::is_defined_tensor;
using internal::mask_dimension_error;
using internal::TextPart;

namespace {

template <TextPart... Parts>
[[noreturn]] void fail(const Path& path, const Parts&... problem) {
  throw ChunkError(concat(path.text(), ": ", problem...));
}

std::int64_t checked_dim(const at::Tensor& tensor, const TensorChunkSpec& spec, const Path& path) {
  const std::int64_t dims = tensor.dim();
  if (spec.split_dim >= -dims && spec.split_dim < dims)
    return spec.split_dim < 0 ? spec.split_dim + dims : spec.split_dim;
  fail(path, "found ", describe(tensor), ", which has no dimension ", spec.split_dim, " to split.",
       (dims == 0 ? "\n  Hint: Replicate() gives each chunk the whole value." : ""));
}

// Returns a copy of the whole tensor with all but one range of a dimension zeroed.
at::Tensor masked(const at::Tensor& whole, std::int64_t dim, const ChunkRange& range) {
  at::Tensor result = at::zeros_like(whole);
  result.narrow(dim, range.begin, range.length).copy_(whole.narrow(dim, range.begin, range.length));
  return result;
}

// Returns true if a slice of the tensor only needs other sizes on the same storage, and autograd does not need to
// record it.
bool is_plain(const at::Tensor& tensor) {
  return !tensor.requires_grad() && !tensor._fw_grad(/*level=*/0).defined() && tensor.layout() == at::kStrided &&
         !tensor.is_nested() && !tensor.is_quantized() && !tensor.is_conj() && !tensor.is_neg();
}

// Returns a slice of a plain tensor without dispatching through autograd, which takes a fifth of the time. As with
// detach(), writing into the slice increments the version of the whole.
at::Tensor slice_below_autograd(const at::Tensor& tensor, std::int64_t dim, const ChunkRange& range) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::SmallVector<std::int64_t, 5> sizes(tensor.sizes().begin(), tensor.sizes().end());
  sizes[static_cast<std::size_t>(dim)] = range.length;
  at::Tensor result =
      at::as_strided(tensor, sizes, tensor.strides(), tensor.storage_offset() + range.begin * tensor.stride(dim));
  if (!tensor.is_inference()) {
    result.unsafeGetTensorImpl()->set_version_counter(tensor.unsafeGetTensorImpl()->version_counter());
  }
  return result;
}

// Returns a slice that autograd records. Slices of a leaf that requires grad have their own .grad.
at::Tensor slice(const at::Tensor& tensor, std::int64_t dim, const ChunkRange& range) {
  at::Tensor result = tensor.narrow(dim, range.begin, range.length);
  if (tensor.is_leaf() && result.requires_grad()) result.retain_grad();
  return result;
}

std::vector<c10::IValue> split_tensor(const at::Tensor& tensor, std::int64_t dim, std::int64_t chunks) {
  const auto chunk_of = debug_mask_minibatches() ? masked : is_plain(tensor) ? slice_below_autograd : slice;
  std::vector<c10::IValue> result;
  result.reserve(static_cast<std::size_t>(chunks));
  for (std::int64_t i = 0; i < chunks; ++i) {
    result.emplace_back(chunk_of(tensor, dim, chunk_range(tensor.size(dim), chunks, i)));
  }
  return result;
}

// Collects the leaves of all arguments with their specs, splits them, and builds the arguments of each chunk.
class Splitter {
 public:
  // Adds the leaves of a value. `spec` is null for the default.
  void add(const c10::IValue& value, const c10::IValue* spec, const Path& path) {
    if (spec != nullptr && node_kind(value) != node_kind(*spec)) {
      fail(path, "found ", describe(value), ", but its spec is ", spec_text(*spec), ".");
    }
    switch (node_kind(value)) {
      case NodeKind::Leaf: add_leaf(value, spec, path); break;
      case NodeKind::Tuple:
        add_all(value.toTupleRef().elements(),
                spec == nullptr ? std::nullopt : elements_of(spec->toTupleRef().elements()), path, value, spec);
        break;
      case NodeKind::List:
        add_all(value.toListRef(), spec == nullptr ? std::nullopt : elements_of(spec->toListRef()), path, value, spec);
        break;
      case NodeKind::Dict: add_dict(value, spec, path); break;
    }
  }

  // Returns the number of chunks that all leaves can be split into, at most `wanted`.
  std::int64_t chunks(std::int64_t wanted) const {
    for (const Leaf& leaf : leaves_) wanted = std::min(wanted, leaf.size);
    return wanted;
  }

  void split(std::int64_t chunks) {
    for (Leaf& leaf : leaves_) {
      leaf.chunks = split_leaf(leaf, chunks);
    }
  }

  // Returns one chunk of a value. Called, after rewind(), for the values in the order in which they were added.
  c10::IValue chunk(const c10::IValue& value, std::size_t index) {
    if (node_kind(value) == NodeKind::Leaf) return std::move(leaves_[next_++].chunks[index]);
    return map_leaves(value, [&](const c10::IValue&) { return std::move(leaves_[next_++].chunks[index]); });
  }
  void rewind() { next_ = 0; }

 private:
  // Size of a leaf that can be split into any number of chunks.
  static constexpr std::int64_t kAny = std::numeric_limits<std::int64_t>::max();

  struct Leaf {
    c10::IValue value;
    std::int64_t dim = 0;
    // Size of the dimension that is split.
    std::int64_t size = kAny;
    bool replicated = false;
    std::vector<c10::IValue> chunks = {};
  };

  static std::optional<c10::ArrayRef<c10::IValue>> elements_of(c10::ArrayRef<c10::IValue> elements) { return elements; }

  void add_all(c10::ArrayRef<c10::IValue> values, const std::optional<c10::ArrayRef<c10::IValue>>& specs,
               const Path& path, const c10::IValue& whole, const c10::IValue* spec) {
    if (specs && specs->size() != values.size()) {
      fail(path, "found ", describe(whole), ", but its spec is ", spec_text(*spec), ".");
    }
    for (std::size_t i = 0; i < values.size(); ++i) add(values[i], specs ? &(*specs)[i] : nullptr, Path(path, i));
  }

  void add_dict(const c10::IValue& value, const c10::IValue* spec, const Path& path) {
    const auto dict = value.toGenericDict();
    if (spec != nullptr && spec->toGenericDict().size() != dict.size()) {
      fail(path, "found ", describe(value), ", but its spec is ", spec_text(*spec), ".");
    }
    for (const auto& entry : dict) {
      const c10::IValue& key = entry.key();
      const Path here(path, key);
      if (spec == nullptr) {
        add(entry.value(), nullptr, here);
        continue;
      }
      const auto specs = spec->toGenericDict();
      const auto found = specs.find(key);
      if (found == specs.end()) fail(here, "its spec ", spec_text(*spec), " has no such key.");
      const c10::IValue inner = found->value();
      add(entry.value(), &inner, here);
    }
  }

  static std::vector<c10::IValue> split_leaf(const Leaf& leaf, std::int64_t chunks) {
    if (leaf.replicated) return std::vector<c10::IValue>(static_cast<std::size_t>(chunks), leaf.value);
    if (is_defined_tensor(leaf.value)) return split_tensor(leaf.value.toTensor(), leaf.dim, chunks);
    std::vector<c10::IValue> result;
    for (const BlockMask& chunk : BlockMask::from_ivalue(leaf.value).split(chunks)) result.push_back(chunk.to_ivalue());
    return result;
  }

  void add_leaf(const c10::IValue& value, const c10::IValue* given, const Path& path) {
    const ChunkSpec* spec = given == nullptr ? nullptr : chunk_spec_of(*given);
    if (given != nullptr && spec == nullptr) {
      fail(path, "its spec is ", describe(*given), ", expected TensorChunkSpec(dim) or Replicate().");
    }
    const bool can_split = is_defined_tensor(value) || BlockMask::is(value);
    Leaf leaf{.value = value};
    leaf.replicated = spec == nullptr ? !can_split : std::holds_alternative<Replicate>(*spec);
    if (!leaf.replicated) {
      const auto* const by_dim = spec == nullptr ? nullptr : std::get_if<TensorChunkSpec>(spec);
      if (spec != nullptr && by_dim == nullptr) fail(path, "a reducer merges chunks, it cannot split a value.");
      if (!can_split) fail(path, "found ", describe(value), ", which ", spec_text(*given), " cannot split.");
      set_dimension(leaf, by_dim == nullptr ? TensorChunkSpec(DEFAULT_CHUNK_DIM) : *by_dim, path);
    }
    leaves_.push_back(std::move(leaf));
  }

  // Checks and sets the dimension of a leaf, and its size.
  static void set_dimension(Leaf& leaf, const TensorChunkSpec& spec, const Path& path) {
    if (is_defined_tensor(leaf.value)) {
      leaf.dim = checked_dim(leaf.value.toTensor(), spec, path);
      leaf.size = leaf.value.toTensor().size(leaf.dim);
    } else {
      if (spec.split_dim != 0) fail(path, mask_dimension_error(spec));
      const std::int64_t batch = BlockMask::from_ivalue(leaf.value).batch();
      // A mask with batch 1 is shared by all chunks.
      leaf.size = batch == 1 ? kAny : batch;
    }
    if (leaf.size == 0) {
      fail(path, "found ", describe(leaf.value), ", which has nothing to split along dimension ", leaf.dim, ".");
    }
  }

  std::vector<Leaf> leaves_;
  std::size_t next_ = 0;
};

}  // namespace

SplitArgs split_args_kwargs_into_chunks(const Args& args, const Kwargs& kwargs, std::int64_t chunks,
                                        const std::optional<c10::IValue>& args_spec,
                                        const std::optional<c10::IValue>& kwargs_spec) {
  if (chunks < 1) throw ChunkError(concat("arguments can be split into 1 or more chunks, not into ", chunks, "."));
  Splitter splitter;
  splitter.add(to_value(args), args_spec ? &*args_spec : nullptr, Path("args"));
  splitter.add(to_value(kwargs), kwargs_spec ? &*kwargs_spec : nullptr, Path("kwargs"));
  const std::int64_t count = splitter.chunks(chunks);
  splitter.split(count);

  SplitArgs result;
  result.args.reserve(static_cast<std::size_t>(count));
  result.kwargs.reserve(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
    splitter.rewind();
    Args& chunk_args = result.args.emplace_back();
    chunk_args.reserve(args.size());
    for (const c10::IValue& arg : args) chunk_args.push_back(splitter.chunk(arg, i));
    Kwargs& chunk_kwargs = result.kwargs.emplace_back();
    for (const auto& [name, value] : kwargs) chunk_kwargs.emplace(name, splitter.chunk(value, i));
  }
  return result;
}

}  // namespace penstock
