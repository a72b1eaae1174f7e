#include "penstock/tensor/nested.h"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/detach.h>

#include <algorithm>
#include <sstream>
#include <utility>

namespace penstock {
namespace {

std::string key_text(const c10::IValue& key) {
  if (key.isString()) return "'" + key.toStringRef() + "'";
  std::ostringstream text;
  text << key;
  return std::move(text).str();
}

std::string names_of(const c10::Dict<c10::IValue, c10::IValue>& dict) {
  std::string names;
  for (const auto& entry : dict) names += (names.empty() ? "" : ", ") + key_text(entry.key());
  return names;
}

// The element types of a list are kept as they are: leaves are replaced by leaves of their own kind.
c10::IValue list_like(const c10::IValue& list, std::vector<c10::IValue> elements) {
  c10::List<c10::IValue> result(list.toList().elementType());
  result.reserve(elements.size());
  for (c10::IValue& element : elements) result.push_back(std::move(element));
  return result;
}

c10::IValue tuple_like(const c10::IValue& tuple, std::vector<c10::IValue> elements) {
  const auto type = tuple.toTupleRef().type<c10::TupleType>();
  if (type->schema() != nullptr) return c10::ivalue::Tuple::createNamed(std::move(elements), type);
  return c10::ivalue::Tuple::create(std::move(elements));
}

}  // namespace

std::string Path::text() const {
  if (parent_ == nullptr) return std::string(std::get<std::string_view>(step_));
  if (const auto* index = std::get_if<std::size_t>(&step_)) return parent_->text() + "[" + std::to_string(*index) + "]";
  return parent_->text() + "[" + key_text(*std::get<const c10::IValue*>(step_)) + "]";
}

NodeKind node_kind(const c10::IValue& value) {
  if (value.isTuple()) return NodeKind::Tuple;
  if (value.isList()) return NodeKind::List;
  if (value.isGenericDict()) return NodeKind::Dict;
  return NodeKind::Leaf;
}

std::string describe(const c10::IValue& value) {
  std::ostringstream text;
  switch (node_kind(value)) {
    case NodeKind::Tuple: text << "tuple of " << value.toTupleRef().size(); break;
    case NodeKind::List: text << "list of " << value.toListRef().size(); break;
    case NodeKind::Dict:
      if (value.toGenericDict().empty()) {
        text << "empty dict";
      } else {
        text << "dict with " << names_of(value.toGenericDict());
      }
      break;
    case NodeKind::Leaf:
      if (value.isTensor()) {
        const at::Tensor& tensor = value.toTensor();
        if (!tensor.defined()) return "undefined tensor";
        text << tensor.scalar_type() << " tensor of shape " << tensor.sizes();
      } else if (value.isNone()) {
        text << "None";
      } else if (value.isString()) {
        text << "str " << key_text(value);
      } else if (value.isCustomClass() || value.isObject() || value.isCapsule()) {
        text << value.type()->repr_str();
      } else {
        text << value.tagKind() << " " << value;
      }
      break;
  }
  return std::move(text).str();
}

void for_each_leaf(const c10::IValue& value, const Path& path,
                   const std::function<void(const c10::IValue&, const Path&)>& visit) {
  const auto visit_all = [&](c10::ArrayRef<c10::IValue> elements) {
    for (std::size_t i = 0; i < elements.size(); ++i) for_each_leaf(elements[i], Path(path, i), visit);
  };
  switch (node_kind(value)) {
    case NodeKind::Leaf: visit(value, path); break;
    case NodeKind::Tuple: visit_all(value.toTupleRef().elements()); break;
    case NodeKind::List: visit_all(value.toListRef()); break;
    case NodeKind::Dict:
      for (const auto& entry : value.toGenericDict()) {
        const c10::IValue key = entry.key();
        for_each_leaf(entry.value(), Path(path, key), visit);
      }
      break;
  }
}

c10::IValue map_leaves(const c10::IValue& value, const std::function<c10::IValue(const c10::IValue&)>& map) {
  const auto map_all = [&](c10::ArrayRef<c10::IValue> elements) {
    std::vector<c10::IValue> mapped;
    mapped.reserve(elements.size());
    for (const c10::IValue& element : elements) mapped.push_back(map_leaves(element, map));
    return mapped;
  };
  switch (node_kind(value)) {
    case NodeKind::Leaf: return map(value);
    case NodeKind::Tuple: return tuple_like(value, map_all(value.toTupleRef().elements()));
    case NodeKind::List: return list_like(value, map_all(value.toListRef()));
    case NodeKind::Dict: break;
  }
  const auto dict = value.toGenericDict();
  c10::Dict<c10::IValue, c10::IValue> result(dict.keyType(), dict.valueType());
  result.reserve(dict.size());
  for (const auto& entry : dict) result.insert(entry.key(), map_leaves(entry.value(), map));
  return result;
}

std::string structure_difference(const c10::IValue& expected, const c10::IValue& found, const Path& path) {
  const auto differ = [&] {
    return path.text() + ": found " + describe(found) + ", expected " + describe(expected) + ".";
  };
  if (node_kind(expected) != node_kind(found)) return differ();
  const auto compare_all = [&](c10::ArrayRef<c10::IValue> one, c10::ArrayRef<c10::IValue> other) {
    if (one.size() != other.size()) return differ();
    for (std::size_t i = 0; i < one.size(); ++i) {
      std::string difference = structure_difference(one[i], other[i], Path(path, i));
      if (!difference.empty()) return difference;
    }
    return std::string();
  };
  switch (node_kind(expected)) {
    case NodeKind::Leaf: return {};
    case NodeKind::Tuple: return compare_all(expected.toTupleRef().elements(), found.toTupleRef().elements());
    case NodeKind::List: return compare_all(expected.toListRef(), found.toListRef());
    case NodeKind::Dict: break;
  }
  const auto dict = found.toGenericDict();
  if (dict.size() != expected.toGenericDict().size()) return differ();
  for (const auto& entry : expected.toGenericDict()) {
    const c10::IValue key = entry.key();
    const auto other = dict.find(key);
    if (other == dict.end()) return differ();
    std::string difference = structure_difference(entry.value(), other->value(), Path(path, key));
    if (!difference.empty()) return difference;
  }
  return {};
}

std::vector<c10::IValue> flatten_args(const c10::IValue& value) {
  std::vector<c10::IValue> leaves;
  for_each_leaf(value, Path("args"), [&](const c10::IValue& leaf, const Path&) { leaves.push_back(leaf); });
  return leaves;
}

DetachedArgs flatten_args_detach(const c10::IValue& value) {
  DetachedArgs result;
  result.value = map_leaves(value, [&](const c10::IValue& leaf) {
    c10::IValue detached = leaf;
    if (leaf.isTensor() && leaf.toTensor().defined()) {
      detached = at::detach(leaf.toTensor()).requires_grad_(leaf.toTensor().requires_grad());
    }
    result.leaves.push_back(detached);
    return detached;
  });
  return result;
}

std::vector<at::Tensor> extract_tensor_args(const c10::IValue& value) {
  std::vector<at::Tensor> tensors;
  for_each_leaf(value, Path("args"), [&](const c10::IValue& leaf, const Path&) {
    if (leaf.isTensor()) tensors.push_back(leaf.toTensor());
  });
  return tensors;
}

}  // namespace penstock
