#include <ATen/core/Dict.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ne.h>

#include <cmath>
#include <exception>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/tensor/block_mask.h"
#include "penstock/tensor/chunk_range.h"
#include "penstock/tensor/microbatch.h"
#include "penstock/tensor/nested.h"

namespace penstock {

using internal::chunk_range;
using internal::concat;
using internal::is_defined_tensor;
using internal::mask_dimension_error;
using internal::TextPart;

namespace {

// Compares values; NaN equals NaN.
bool equal_tensors(const at::Tensor& first, const at::Tensor& second) {
  if (first.is_same(second)) return true;
  if (first.scalar_type() != second.scalar_type() || first.sizes() != second.sizes() ||
      first.device() != second.device()) {
    return false;
  }
  const auto both_nan = [&] { return at::ne(first, first).logical_and_(at::ne(second, second)); };
  return at::equal(first, second) || at::eq(first, second).logical_or_(both_nan()).all().item<bool>();
}

bool equal_leaves(const c10::IValue& one, const c10::IValue& other) {
  if (one.isTensor() && other.isTensor()) {
    const bool both = is_defined_tensor(one) && is_defined_tensor(other);
    return both ? equal_tensors(one.toTensor(), other.toTensor()) : is_defined_tensor(one) == is_defined_tensor(other);
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
        throw ChunkError(concat(difference, (spec ? "\n  Hint: the spec is " + spec_text(*spec) : std::string())));
      }
    }
    merge(spec ? &*spec : nullptr, chunks, Path(""));
    if (check_only_) return;
    std::size_t next = 0;
    merged_ = map_leaves(chunks.front(), [&](const c10::IValue&) { return std::move(leaves_[next++]); });
  }

  const c10::IValue& merged() const { return merged_; }

 private:
  template <TextPart... Parts>
  [[noreturn]] static void fail_at(std::size_t chunk, const Path& path, const Parts&... problem) {
    throw ChunkError(concat("chunks[", chunk, "]", path.text(), ": ", problem...));
  }

  void merge(const c10::IValue* spec, const std::vector<c10::IValue>& nodes, const Path& path) {
    const auto merge_child = [&](const Path& child_path, const auto& child) {
      std::vector<c10::IValue> children;
      children.reserve(nodes.size());
      for (const c10::IValue& node : nodes) children.push_back(child(node));
      const std::optional<c10::IValue> inner = spec == nullptr ? std::nullopt : std::optional(child(*spec));
      merge(inner ? &*inner : nullptr, children, child_path);
    };
    const c10::IValue& first = nodes.front();
    switch (node_kind(first)) {
      case NodeKind::Leaf: leaves_.push_back(merge_leaf(spec, nodes, path)); break;
      case NodeKind::Tuple:
        for (std::size_t i = 0; i < first.toTupleRef().size(); ++i) {
          merge_child(Path(path, i), [&](const c10::IValue& node) { return node.toTupleRef().elements()[i]; });
        }
        break;
      case NodeKind::List:
        for (std::size_t i = 0; i < first.toListRef().size(); ++i) {
          merge_child(Path(path, i), [&](const c10::IValue& node) { return node.toListRef()[i]; });
        }
        break;
      case NodeKind::Dict:
        for (const auto& entry : first.toGenericDict()) {
          const c10::IValue& key = entry.key();
          merge_child(Path(path, key), [&](const c10::IValue& node) { return node.toGenericDict().at(key); });
        }
        break;
    }
  }

  c10::IValue merge_leaf(const c10::IValue* given, const std::vector<c10::IValue>& parts, const Path& path) const {
    if (given == nullptr) return join(TensorChunkSpec(DEFAULT_CHUNK_DIM), parts, path);
    const ChunkSpec* const spec = chunk_spec_of(*given);
    // torch.distributed.pipelining treats None in a spec as replication.
    if (spec == nullptr && !given->isNone()) {
      throw ChunkError(concat("the spec of chunks", path.text(), " is ", describe(*given),
                              ", expected TensorChunkSpec(dim), Replicate() or a reducer."));
    }
    if (spec == nullptr || std::holds_alternative<Replicate>(*spec)) return merge_replicated(parts, path);
    if (const auto* by_dim = std::get_if<TensorChunkSpec>(spec)) return join(*by_dim, parts, path);
    return check_only_ ? c10::IValue() : fold(std::get<CustomReducer>(*spec), parts, path);
  }

  static c10::IValue fold(const CustomReducer& reducer, const std::vector<c10::IValue>& parts, const Path& path) {
    c10::IValue so_far = reducer.init_value();
    for (std::size_t i = 0; i < parts.size(); ++i) {
      try {
        so_far = reducer.reduce(so_far, parts[i]);
      } catch (const c10::Error& error) {
        fail_reduced(i, path, parts[i], error.what_without_backtrace());
      } catch (const std::exception& error) {
        fail_reduced(i, path, parts[i], error.what());
      }
    }
    return so_far;
  }
  [[noreturn]] static void fail_reduced(std::size_t chunk, const Path& path, const c10::IValue& part,
                                        const std::string& why) {
    fail_at(chunk, path, "found ", describe(part), ", which its reducer cannot take: ", why);
  }

  static c10::IValue merge_replicated(const std::vector<c10::IValue>& parts, const Path& path) {
    for (std::size_t i = 1; i < parts.size(); ++i) {
      if (equal_leaves(parts.front(), parts[i])) continue;
      fail_at(i, path, "found ", describe(parts[i]), ", expected it to equal chunks[0]", path.text(), ", ",
              describe(parts.front()), ", since it is replicated.");
    }
    return parts.front();
  }

  c10::IValue join_masks(const std::vector<c10::IValue>& parts, const Path& path) const {
    std::vector<BlockMask> masks;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (!BlockMask::is(parts[i])) fail_at(i, path, "found ", describe(parts[i]), ", expected a block mask to join.");
      masks.push_back(BlockMask::from_ivalue(parts[i]));
      if (masks[i].form() == masks.front().form()) continue;
      fail_at(i, path, "found a block mask of ", masks[i].form(), ", which cannot follow chunks[0]", path.text(),
              ", of ", masks.front().form(), ".");
    }
    return check_only_ ? c10::IValue() : BlockMask::merge(masks).to_ivalue();
  }

  c10::IValue join(const TensorChunkSpec& spec, const std::vector<c10::IValue>& parts, const Path& path) const {
    if (BlockMask::is(parts.front())) {
      if (spec.split_dim != 0) fail_at(0, path, mask_dimension_error(spec));
      return join_masks(parts, path);
    }
    const auto count = static_cast<std::int64_t>(parts.size());
    std::vector<at::Tensor> tensors;
    tensors.reserve(parts.size());
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (!is_defined_tensor(parts[i])) fail_at(i, path, "found ", describe(parts[i]), ", expected a tensor to join.");
      at::Tensor part = parts[i].toTensor();
      const at::Tensor& first = parts.front().toTensor();
      const std::int64_t dims = part.dim();
      if (spec.split_dim < -dims || spec.split_dim >= dims) {
        fail_at(i, path, "found ", describe(part), ", which has no dimension ", spec.split_dim, " to join along.",
                (dims == 0 ? "\n  Hint: a reducer, such as sum_reducer(), merges scalars." : ""));
      }
      const std::int64_t dim = spec.split_dim < 0 ? spec.split_dim + dims : spec.split_dim;
      if (!fit(first, part, dim)) {
        fail_at(i, path, "found ", describe(part), ", which cannot follow chunks[0]", path.text(), ", ",
                describe(first), ", along dimension ", spec.split_dim, ".");
      }
      if (debug_mask_minibatches()) {
        const auto [begin, length] = chunk_range(part.size(dim), count, static_cast<std::int64_t>(i));
        part = part.narrow(dim, begin, length);
      }
      tensors.push_back(std::move(part));
    }
    return check_only_ ? c10::IValue() : c10::IValue(at::cat(tensors, spec.split_dim));
  }

  // Returns true if two tensors can be concatenated along `dim`. In debug mode each is a whole tensor that is masked,
  // so they must have the same size along `dim` too.
  static bool fit(const at::Tensor& first, const at::Tensor& second, std::int64_t dim) {
    if (first.dim() != second.dim() || first.device() != second.device()) return false;
    for (std::int64_t i = 0; i < first.dim(); ++i) {
      if ((i != dim || debug_mask_minibatches()) && first.size(i) != second.size(i)) return false;
    }
    return true;
  }

  bool check_only_;
  std::vector<c10::IValue> leaves_;
  c10::IValue merged_;
};

}  // namespace

c10::IValue merge_chunks(const std::vector<c10::IValue>& chunks, const std::optional<c10::IValue>& spec) {
  return Merger(chunks, spec, Merger::Extent::Merge).merged();
}

void require_mergeable(const std::vector<c10::IValue>& chunks, const std::optional<c10::IValue>& spec) {
  const Merger checked(chunks, spec, Merger::Extent::CheckOnly);
}

}  // namespace penstock
