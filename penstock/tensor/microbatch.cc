#include "penstock/tensor/microbatch.h"

#include <ATen/core/Dict.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <exception>
#include <limits>
#include <utility>

#include "penstock/tensor/block_mask.h"
#include "penstock/tensor/nested.h"

namespace penstock {
namespace {

std::atomic<bool> mask_minibatches = false;

[[noreturn]] void fail(const Path& path, const std::string& what) {
  throw ChunkError(path.text() + ": " + what);
}

bool is_tensor(const c10::IValue& leaf) {
  return leaf.isTensor() && leaf.toTensor().defined();
}

std::int64_t checked_dim(const at::Tensor& tensor, const TensorChunkSpec& spec, const Path& path) {
  const std::int64_t dims = tensor.dim();
  if (spec.split_dim >= -dims && spec.split_dim < dims)
    return spec.split_dim < 0 ? spec.split_dim + dims : spec.split_dim;
  fail(path, "found " + describe(tensor) + ", which has no dimension " + std::to_string(spec.split_dim) + " to split." +
                 (dims == 0 ? "\n  Hint: Replicate() gives each chunk the whole value." : ""));
}

std::string no_mask_dimension(const TensorChunkSpec& spec) {
  return "a block mask is split along dimension 0, its batch, not along " + std::to_string(spec.split_dim) + ".";
}

// What a chunk has of a dimension.
struct Part {
  std::int64_t begin = 0;
  std::int64_t length = 0;
};
// The first size % count chunks are longer by one.
Part part_of(std::int64_t size, std::int64_t count, std::int64_t index) {
  return {.begin = index * (size / count) + std::min(index, size % count),
          .length = size / count + (index < size % count ? 1 : 0)};
}

// The whole tensor with all but one part of a dimension zeroed.
at::Tensor masked(const at::Tensor& whole, std::int64_t dim, const Part& part) {
  at::Tensor result = at::zeros_like(whole);
  result.narrow(dim, part.begin, part.length).copy_(whole.narrow(dim, part.begin, part.length));
  return result;
}

// Whether a part of the tensor is no more than other sizes on the same storage, with nothing for autograd to know.
bool is_plain(const at::Tensor& tensor) {
  return !tensor.requires_grad() && !tensor._fw_grad(/*level=*/0).defined() && tensor.layout() == at::kStrided &&
         !tensor.is_nested() && !tensor.is_quantized() && !tensor.is_conj() && !tensor.is_neg();
}

// The part of a plain tensor, without a word to autograd, which takes a fifth of the time. As with detach(), what is
// written into it counts as written into the whole.
at::Tensor alias(const at::Tensor& tensor, std::int64_t dim, const Part& part) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::SmallVector<std::int64_t, 5> sizes(tensor.sizes().begin(), tensor.sizes().end());
  sizes[static_cast<std::size_t>(dim)] = part.length;
  at::Tensor result =
      at::as_strided(tensor, sizes, tensor.strides(), tensor.storage_offset() + part.begin * tensor.stride(dim));
  if (!tensor.is_inference()) {
    result.unsafeGetTensorImpl()->set_version_counter(tensor.unsafeGetTensorImpl()->version_counter());
  }
  return result;
}

// The chunks of a leaf that requires grad have their own .grad.
at::Tensor view(const at::Tensor& tensor, std::int64_t dim, const Part& part) {
  at::Tensor result = tensor.narrow(dim, part.begin, part.length);
  if (tensor.is_leaf() && result.requires_grad()) result.retain_grad();
  return result;
}

std::vector<c10::IValue> split_tensor(const at::Tensor& tensor, std::int64_t dim, std::int64_t chunks) {
  const auto chunk_of = debug_mask_minibatches() ? masked : is_plain(tensor) ? alias : view;
  std::vector<c10::IValue> result;
  result.reserve(static_cast<std::size_t>(chunks));
  for (std::int64_t i = 0; i < chunks; ++i) {
    result.emplace_back(chunk_of(tensor, dim, part_of(tensor.size(dim), chunks, i)));
  }
  return result;
}

// What becomes of each leaf of a list of arguments.
class Splitter {
 public:
  // `spec` is null for the default.
  void add(const c10::IValue& value, const c10::IValue* spec, const Path& path) {
    if (spec != nullptr && node_kind(value) != node_kind(*spec)) {
      fail(path, "found " + describe(value) + ", but its spec is " + spec_text(*spec) + ".");
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

  // How many chunks there can be, at most `wanted`.
  std::int64_t chunks(std::int64_t wanted) const {
    for (const Leaf& leaf : leaves_) wanted = std::min(wanted, leaf.size);
    return wanted;
  }

  void split(std::int64_t chunks) {
    for (Leaf& leaf : leaves_) {
      leaf.chunks = split_leaf(leaf, chunks);
    }
  }

  // The values that were added, in their order, for one chunk.
  c10::IValue chunk(const c10::IValue& value, std::size_t index) {
    if (node_kind(value) == NodeKind::Leaf) return std::move(leaves_[next_++].chunks[index]);
    return map_leaves(value, [&](const c10::IValue&) { return std::move(leaves_[next_++].chunks[index]); });
  }
  void rewind() { next_ = 0; }

 private:
  // It goes into any number of chunks.
  static constexpr std::int64_t kAny = std::numeric_limits<std::int64_t>::max();

  struct Leaf {
    c10::IValue value;
    std::int64_t dim = 0;
    // Along the dimension.
    std::int64_t size = kAny;
    bool replicated = false;
    std::vector<c10::IValue> chunks = {};
  };

  static std::optional<c10::ArrayRef<c10::IValue>> elements_of(c10::ArrayRef<c10::IValue> elements) { return elements; }

  void add_all(c10::ArrayRef<c10::IValue> values, const std::optional<c10::ArrayRef<c10::IValue>>& specs,
               const Path& path, const c10::IValue& whole, const c10::IValue* spec) {
    if (specs && specs->size() != values.size()) {
      fail(path, "found " + describe(whole) + ", but its spec is " + spec_text(*spec) + ".");
    }
    for (std::size_t i = 0; i < values.size(); ++i) add(values[i], specs ? &(*specs)[i] : nullptr, Path(path, i));
  }

  void add_dict(const c10::IValue& value, const c10::IValue* spec, const Path& path) {
    const auto dict = value.toGenericDict();
    if (spec != nullptr && spec->toGenericDict().size() != dict.size()) {
      fail(path, "found " + describe(value) + ", but its spec is " + spec_text(*spec) + ".");
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
      if (found == specs.end()) fail(here, "its spec " + spec_text(*spec) + " has no such key.");
      const c10::IValue inner = found->value();
      add(entry.value(), &inner, here);
    }
  }

  static std::vector<c10::IValue> split_leaf(const Leaf& leaf, std::int64_t chunks) {
    if (leaf.replicated) return std::vector<c10::IValue>(static_cast<std::size_t>(chunks), leaf.value);
    if (is_tensor(leaf.value)) return split_tensor(leaf.value.toTensor(), leaf.dim, chunks);
    std::vector<c10::IValue> result;
    for (const BlockMask& chunk : BlockMask::from_ivalue(leaf.value).split(chunks)) result.push_back(chunk.to_ivalue());
    return result;
  }

  void add_leaf(const c10::IValue& value, const c10::IValue* given, const Path& path) {
    const ChunkSpec* spec = given == nullptr ? nullptr : chunk_spec_of(*given);
    if (given != nullptr && spec == nullptr) {
      fail(path, "its spec is " + describe(*given) + ", expected TensorChunkSpec(dim) or Replicate().");
    }
    const bool can_split = is_tensor(value) || BlockMask::is(value);
    Leaf leaf{.value = value};
    leaf.replicated = spec == nullptr ? !can_split : std::holds_alternative<Replicate>(*spec);
    if (!leaf.replicated) {
      const auto* const by_dim = spec == nullptr ? nullptr : std::get_if<TensorChunkSpec>(spec);
      if (spec != nullptr && by_dim == nullptr) fail(path, "a reducer merges chunks, it cannot split a value.");
      if (!can_split) fail(path, "found " + describe(value) + ", which " + spec_text(*given) + " cannot split.");
      measure(leaf, by_dim == nullptr ? TensorChunkSpec(DEFAULT_CHUNK_DIM) : *by_dim, path);
    }
    leaves_.push_back(std::move(leaf));
  }

  // How far a leaf can be split.
  static void measure(Leaf& leaf, const TensorChunkSpec& spec, const Path& path) {
    if (is_tensor(leaf.value)) {
      leaf.dim = checked_dim(leaf.value.toTensor(), spec, path);
      leaf.size = leaf.value.toTensor().size(leaf.dim);
    } else {
      if (spec.split_dim != 0) fail(path, no_mask_dimension(spec));
      const std::int64_t batch = BlockMask::from_ivalue(leaf.value).batch();
      // The mask of one row is shared by all chunks.
      leaf.size = batch == 1 ? kAny : batch;
    }
    if (leaf.size == 0) {
      fail(path, "found " + describe(leaf.value) + ", which has nothing to split along dimension " +
                     std::to_string(leaf.dim) + ".");
    }
  }

  std::vector<Leaf> leaves_;
  std::size_t next_ = 0;
};

// NaN is equal to NaN.
bool equal_tensors(const at::Tensor& one, const at::Tensor& other) {
  if (one.is_same(other)) return true;
  if (one.scalar_type() != other.scalar_type() || one.sizes() != other.sizes() || one.device() != other.device()) {
    return false;
  }
  return at::equal(one, other) ||
         at::eq(one, other).logical_or_(at::ne(one, one).logical_and_(at::ne(other, other))).all().item<bool>();
}

bool equal_leaves(const c10::IValue& one, const c10::IValue& other) {
  if (one.isTensor() && other.isTensor()) {
    const bool both = is_tensor(one) && is_tensor(other);
    return both ? equal_tensors(one.toTensor(), other.toTensor()) : is_tensor(one) == is_tensor(other);
  }
  if (one.isTensor() || other.isTensor()) return false;
  if (one.isDouble() && other.isDouble() && std::isnan(one.toDouble())) return std::isnan(other.toDouble());
  return one == other;
}

// Merges chunks leaf by leaf, in the order of the first chunk's leaves.
class Merger {
 public:
  enum class Extent { Merge, CheckOnly };

  Merger(const std::vector<c10::IValue>& chunks, const std::optional<c10::IValue>& spec, Extent extent)
      : check_only_(extent == Extent::CheckOnly) {
    if (chunks.empty()) throw ChunkError("there is no chunk to merge.");
    const Path root("chunks");
    const c10::IValue& structure = spec ? *spec : chunks.front();
    for (std::size_t i = 0; i < chunks.size(); ++i) {
      const std::string difference = structure_difference(structure, chunks[i], Path(root, i));
      if (!difference.empty()) {
        throw ChunkError(difference + (spec ? "\n  Hint: the spec is " + spec_text(*spec) : std::string()));
      }
    }
    merge(spec ? &*spec : nullptr, chunks, Path(""));
    if (check_only_) return;
    std::size_t next = 0;
    merged_ = map_leaves(chunks.front(), [&](const c10::IValue&) { return std::move(leaves_[next++]); });
  }

  const c10::IValue& merged() const { return merged_; }

 private:
  [[noreturn]] static void fail_at(std::size_t chunk, const Path& inside, const std::string& what) {
    throw ChunkError("chunks[" + std::to_string(chunk) + "]" + inside.text() + ": " + what);
  }

  void merge(const c10::IValue* spec, const std::vector<c10::IValue>& nodes, const Path& inside) {
    const auto merge_child = [&](const Path& path, const auto& child) {
      std::vector<c10::IValue> children;
      children.reserve(nodes.size());
      for (const c10::IValue& node : nodes) children.push_back(child(node));
      const std::optional<c10::IValue> inner = spec == nullptr ? std::nullopt : std::optional(child(*spec));
      merge(inner ? &*inner : nullptr, children, path);
    };
    const c10::IValue& first = nodes.front();
    switch (node_kind(first)) {
      case NodeKind::Leaf: leaves_.push_back(merge_leaf(spec, nodes, inside)); break;
      case NodeKind::Tuple:
        for (std::size_t i = 0; i < first.toTupleRef().size(); ++i) {
          merge_child(Path(inside, i), [&](const c10::IValue& node) { return node.toTupleRef().elements()[i]; });
        }
        break;
      case NodeKind::List:
        for (std::size_t i = 0; i < first.toListRef().size(); ++i) {
          merge_child(Path(inside, i), [&](const c10::IValue& node) { return node.toListRef()[i]; });
        }
        break;
      case NodeKind::Dict:
        for (const auto& entry : first.toGenericDict()) {
          const c10::IValue& key = entry.key();
          merge_child(Path(inside, key), [&](const c10::IValue& node) { return node.toGenericDict().at(key); });
        }
        break;
    }
  }

  c10::IValue merge_leaf(const c10::IValue* given, const std::vector<c10::IValue>& parts, const Path& inside) const {
    if (given == nullptr) return join(TensorChunkSpec(DEFAULT_CHUNK_DIM), parts, inside);
    const ChunkSpec* const spec = chunk_spec_of(*given);
    // None in a spec is what the peer takes for replication.
    if (spec == nullptr && !given->isNone()) {
      throw ChunkError("the spec of chunks" + inside.text() + " is " + describe(*given) +
                       ", expected TensorChunkSpec(dim), Replicate() or a reducer.");
    }
    if (spec == nullptr || std::holds_alternative<Replicate>(*spec)) return the_same(parts, inside);
    if (const auto* by_dim = std::get_if<TensorChunkSpec>(spec)) return join(*by_dim, parts, inside);
    return check_only_ ? c10::IValue() : fold(std::get<CustomReducer>(*spec), parts, inside);
  }

  static c10::IValue fold(const CustomReducer& reducer, const std::vector<c10::IValue>& parts, const Path& inside) {
    c10::IValue so_far = reducer.init_value();
    for (std::size_t i = 0; i < parts.size(); ++i) {
      try {
        so_far = reducer.reduce(so_far, parts[i]);
      } catch (const c10::Error& error) {
        fail_reduced(i, inside, parts[i], error.what_without_backtrace());
      } catch (const std::exception& error) {
        fail_reduced(i, inside, parts[i], error.what());
      }
    }
    return so_far;
  }
  [[noreturn]] static void fail_reduced(std::size_t chunk, const Path& inside, const c10::IValue& part,
                                        const std::string& why) {
    fail_at(chunk, inside, "found " + describe(part) + ", which its reducer cannot take: " + why);
  }

  static c10::IValue the_same(const std::vector<c10::IValue>& parts, const Path& inside) {
    for (std::size_t i = 1; i < parts.size(); ++i) {
      if (equal_leaves(parts.front(), parts[i])) continue;
      fail_at(i, inside,
              "found " + describe(parts[i]) + ", expected it to equal chunks[0]" + inside.text() + ", " +
                  describe(parts.front()) + ", since it is replicated.");
    }
    return parts.front();
  }

  c10::IValue join_masks(const std::vector<c10::IValue>& parts, const Path& inside) const {
    std::vector<BlockMask> masks;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (!BlockMask::is(parts[i]))
        fail_at(i, inside, "found " + describe(parts[i]) + ", expected a block mask to join.");
      masks.push_back(BlockMask::from_ivalue(parts[i]));
      if (masks[i].form() == masks.front().form()) continue;
      fail_at(i, inside,
              "found a block mask of " + masks[i].form() + ", which cannot follow chunks[0]" + inside.text() + ", of " +
                  masks.front().form() + ".");
    }
    return check_only_ ? c10::IValue() : BlockMask::merge(masks).to_ivalue();
  }

  c10::IValue join(const TensorChunkSpec& spec, const std::vector<c10::IValue>& parts, const Path& inside) const {
    if (BlockMask::is(parts.front())) {
      if (spec.split_dim != 0) fail_at(0, inside, no_mask_dimension(spec));
      return join_masks(parts, inside);
    }
    const auto count = static_cast<std::int64_t>(parts.size());
    std::vector<at::Tensor> tensors;
    tensors.reserve(parts.size());
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (!is_tensor(parts[i])) fail_at(i, inside, "found " + describe(parts[i]) + ", expected a tensor to join.");
      at::Tensor part = parts[i].toTensor();
      const at::Tensor& first = parts.front().toTensor();
      const std::int64_t dims = part.dim();
      if (spec.split_dim < -dims || spec.split_dim >= dims) {
        fail_at(i, inside,
                "found " + describe(part) + ", which has no dimension " + std::to_string(spec.split_dim) +
                    " to join along." +
                    (dims == 0 ? "\n  Hint: a reducer, such as sum_reducer(), merges scalars." : ""));
      }
      const std::int64_t dim = spec.split_dim < 0 ? spec.split_dim + dims : spec.split_dim;
      if (!fit(first, part, dim)) {
        fail_at(i, inside,
                "found " + describe(part) + ", which cannot follow chunks[0]" + inside.text() + ", " + describe(first) +
                    ", along dimension " + std::to_string(spec.split_dim) + ".");
      }
      if (debug_mask_minibatches()) {
        const auto [begin, length] = part_of(part.size(dim), count, static_cast<std::int64_t>(i));
        part = part.narrow(dim, begin, length);
      }
      tensors.push_back(std::move(part));
    }
    return check_only_ ? c10::IValue() : c10::IValue(at::cat(tensors, spec.split_dim));
  }

  // Whether two tensors have the same sizes but along `dim`; there too, where each is a whole one that is masked.
  static bool fit(const at::Tensor& one, const at::Tensor& other, std::int64_t dim) {
    if (one.dim() != other.dim() || one.device() != other.device()) return false;
    for (std::int64_t i = 0; i < one.dim(); ++i) {
      if ((i != dim || debug_mask_minibatches()) && one.size(i) != other.size(i)) return false;
    }
    return true;
  }

  bool check_only_;
  std::vector<c10::IValue> leaves_;
  c10::IValue merged_;
};

}  // namespace

void set_debug_mask_minibatches(bool on) {
  mask_minibatches = on;
}
bool debug_mask_minibatches() {
  return mask_minibatches;
}

c10::IValue to_value(const Args& args) {
  return c10::ivalue::Tuple::create(args);
}
c10::IValue to_value(const Kwargs& kwargs) {
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  for (const auto& [name, value] : kwargs) dict.insert(name, value);
  return dict;
}

SplitArgs split_args_kwargs_into_chunks(const Args& args, const Kwargs& kwargs, std::int64_t chunks,
                                        const std::optional<c10::IValue>& args_spec,
                                        const std::optional<c10::IValue>& kwargs_spec) {
  if (chunks < 1)
    throw ChunkError("arguments can be split into 1 or more chunks, not into " + std::to_string(chunks) + ".");
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

c10::IValue merge_chunks(const std::vector<c10::IValue>& chunks, const std::optional<c10::IValue>& spec) {
  return Merger(chunks, spec, Merger::Extent::Merge).merged();
}

void require_mergeable(const std::vector<c10::IValue>& chunks, const std::optional<c10::IValue>& spec) {
  const Merger checked(chunks, spec, Merger::Extent::CheckOnly);
}

}  // namespace penstock
