#include "penstock/tensor/chunk_spec.h"

#include <ATen/ops/add.h>
#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <utility>

#include "penstock/tensor/nested.h"

namespace penstock {
namespace {

// Holds a spec as a leaf of a value.
struct SpecHolder : DescribedObject {
  explicit SpecHolder(ChunkSpec held) : spec(std::move(held)) {}

  std::string description() const override {
    if (const auto* by_dim = std::get_if<TensorChunkSpec>(&spec)) {
      return "TensorChunkSpec(" + std::to_string(by_dim->split_dim) + ")";
    }
    return std::holds_alternative<Replicate>(spec) ? "Replicate()" : "CustomReducer";
  }

  ChunkSpec spec;
};

c10::IValue hold(ChunkSpec spec) {
  return c10::IValue::make_capsule(c10::make_intrusive<SpecHolder>(std::move(spec)));
}

c10::IValue specs_of_dims(const c10::IValue& dims, const char* what) {
  for_each_leaf(dims, Path(what), [](const c10::IValue& leaf, const Path& path) {
    if (leaf.isInt()) return;
    throw ChunkError(path.text() + ": found " + describe(leaf) + ", expected the int of a dimension.");
  });
  return map_leaves(dims, [](const c10::IValue& leaf) -> c10::IValue { return TensorChunkSpec(leaf.toInt()); });
}

}  // namespace

c10::IValue TensorChunkSpec::from_tuple(const c10::IValue& dims) {
  return specs_of_dims(dims, "TensorChunkSpec.from_tuple");
}

c10::IValue TensorChunkSpec::from_dict(const c10::IValue& dims) {
  return specs_of_dims(dims, "TensorChunkSpec.from_dict");
}

TensorChunkSpec::operator c10::IValue() const {
  return hold(*this);
}
Replicate::operator c10::IValue() const {
  return hold(*this);
}
CustomReducer::operator c10::IValue() const {
  return hold(*this);
}

CustomReducer::CustomReducer(c10::IValue init_value, Reduce reduce)
    : content_(std::make_shared<const Content>(Content{std::move(init_value), std::move(reduce)})) {}

const CustomReducer& sum_reducer() {
  static const CustomReducer kReducer(
      at::scalar_tensor(0.0), [](const c10::IValue& sum, const c10::IValue& chunk) -> c10::IValue {
        return chunk.isScalar() ? at::add(sum.toTensor(), chunk.toScalar()) : at::add(sum.toTensor(), chunk.toTensor());
      });
  return kReducer;
}

std::string spec_text(const c10::IValue& spec) {
  std::string text;
  const auto add_all = [&](c10::ArrayRef<c10::IValue> elements, char open, char close) {
    text += open;
    for (std::size_t i = 0; i < elements.size(); ++i) text += (i == 0 ? "" : ", ") + spec_text(elements[i]);
    text += close;
  };
  switch (node_kind(spec)) {
    case NodeKind::Tuple: add_all(spec.toTupleRef().elements(), '(', ')'); return text;
    case NodeKind::List: add_all(spec.toListRef(), '[', ']'); return text;
    case NodeKind::Dict:
      for (const auto& entry : spec.toGenericDict()) {
        text += (text.empty() ? "" : ", ") + key_text(entry.key()) + ": " + spec_text(entry.value());
      }
      return "{" + text + "}";
    case NodeKind::Leaf: break;
  }
  return describe(spec);
}

bool equal_specs(const c10::IValue& first, const c10::IValue& second) {
  if (node_kind(first) != node_kind(second)) return false;
  switch (node_kind(first)) {
    case NodeKind::Tuple: {
      const auto& left = first.toTupleRef().elements();
      const auto& right = second.toTupleRef().elements();
      return std::equal(left.begin(), left.end(), right.begin(), right.end(), equal_specs);
    }
    case NodeKind::List: return std::ranges::equal(first.toListRef(), second.toListRef(), equal_specs);
    case NodeKind::Dict: {
      const auto left = first.toGenericDict();
      const auto right = second.toGenericDict();
      return left.size() == right.size() && std::all_of(left.begin(), left.end(), [&](const auto& entry) {
               const auto found = right.find(entry.key());
               return found != right.end() && equal_specs(entry.value(), found->value());
             });
    }
    case NodeKind::Leaf: break;
  }
  const ChunkSpec* const left = chunk_spec_of(first);
  const ChunkSpec* const right = chunk_spec_of(second);
  return left != nullptr && right != nullptr ? *left == *right : left == right && first == second;
}

const ChunkSpec* chunk_spec_of(const c10::IValue& leaf) {
  if (!leaf.isCapsule()) return nullptr;
  const auto* const holder = dynamic_cast<const SpecHolder*>(leaf.toCapsule().get());
  return holder == nullptr ? nullptr : &holder->spec;
}

}  // namespace penstock
