#include "penstock/tensor/nested.h"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/detach.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <sstream>
#include <utility>

#include "penstock/base/text.h"

namespace penstock {

using internal::concat;
using internal::join;
using internal::shape_text;

namespace {

std::string keys_text(const c10::Dict<c10::IValue, c10::IValue>& dict) {
  std::vector<std::string> keys;
  for (const auto& entry : dict) keys.push_back(key_text(entry.key()));
  return join(keys);
}

bool is_of(const c10::IValue& value, const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::AnyType: return true;
    case c10::TypeKind::TensorType: return value.isTensor();
    case c10::TypeKind::IntType: return value.isInt();
    case c10::TypeKind::FloatType: return value.isDouble();
    case c10::TypeKind::BoolType: return value.isBool();
    case c10::TypeKind::StringType: return value.isString();
    default: break;
  }
  // IValue::type() fails for an undefined tensor.
  for (const at::Tensor& tensor : extract_tensor_args(value)) {
    if (!tensor.defined()) return false;
  }
  return value.type()->isSubtypeOf(type);
}

// Returns `type` if all values have it, and Any otherwise.
c10::TypePtr type_for(c10::TypePtr type, c10::ArrayRef<c10::IValue> values) {
  const bool all = std::all_of(values.begin(), values.end(), [&](const c10::IValue& v) { return is_of(v, *type); });
  return all ? type : c10::AnyType::get();
}

c10::IValue list_like(const c10::IValue& list, std::vector<c10::IValue> elements) {
  c10::List<c10::IValue> result(type_for(list.toList().elementType(), elements));
  result.reserve(elements.size());
  for (c10::IValue& element : elements) result.push_back(std::move(element));
  return result;
}

// Returns a tuple of the same kind, named or not. Tuple::type() computes and caches the type of an unnamed tuple from
// its elements, which is slow and not thread-safe, so ask a copy without elements.
c10::IValue tuple_like(const c10::IValue& tuple, std::vector<c10::IValue> elements) {
  c10::ivalue::Tuple copy(tuple.toTupleRef());
  copy.setElements(std::vector<c10::IValue>());
  const auto type = copy.type<c10::TupleType>();
  if (type->schema() != nullptr) return c10::ivalue::Tuple::createNamed(std::move(elements), type);
  return c10::ivalue::Tuple::create(std::move(elements));
}

c10::IValue dict_like(const c10::IValue& dict, std::vector<c10::IValue> values) {
  const auto original = dict.toGenericDict();
  c10::Dict<c10::IValue, c10::IValue> result(original.keyType(), type_for(original.valueType(), values));
  result.reserve(values.size());
  auto value = values.begin();
  for (const auto& entry : original) result.insert(entry.key(), std::move(*value++));
  return result;
}

// Returns the object that a leaf holds if it has a description, and null otherwise.
const DescribedObject* described_object(const c10::IValue& leaf) {
  const c10::IValue held = leaf.isCustomClass() ? leaf.toObjectRef().getSlot(0) : leaf;
  return held.isCapsule() ? dynamic_cast<const DescribedObject*>(held.toCapsule().get()) : nullptr;
}

std::string describe_leaf(const c10::IValue& leaf) {
  if (leaf.isNone()) return "None";
  if (leaf.isString()) return "str " + key_text(leaf);
  if (const DescribedObject* object = described_object(leaf)) return object->description();
  std::ostringstream text;
  if (leaf.isTensor()) {
    const at::Tensor& tensor = leaf.toTensor();
    if (!tensor.defined()) return "undefined tensor";
    text << concat(dtype_name(tensor.scalar_type()), " tensor of shape ", shape_text(tensor.sizes()));
    if (!tensor.is_cpu()) text << " on " << tensor.device();
  } else if (leaf.isObject() || leaf.isCapsule()) {
    text << leaf.type()->repr_str();
  } else {
    text << leaf.type()->repr_str() << " " << leaf;
  }
  return std::move(text).str();
}

}  // namespace

std::string key_text(const c10::IValue& key) {
  if (key.isString()) return "'" + key.toStringRef() + "'";
  std::ostringstream text;
  text << key;
  return std::move(text).str();
}

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

std::string dtype_name(at::ScalarType dtype) {
  return std::string(c10::getDtypeNames(dtype).first);
}

std::string describe(const c10::IValue& value) {
  switch (node_kind(value)) {
    case NodeKind::Leaf: return describe_leaf(value);
    case NodeKind::Tuple: return "tuple of " + std::to_string(value.toTupleRef().size());
    case NodeKind::List: return "list of " + std::to_string(value.toListRef().size());
    case NodeKind::Dict: break;
  }
  const auto dict = value.toGenericDict();
  return dict.empty() ? "empty dict" : "dict with " + keys_text(dict);
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
        const c10::IValue& key = entry.key();
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
  std::vector<c10::IValue> mapped;
  for (const auto& entry : value.toGenericDict()) mapped.push_back(map_leaves(entry.value(), map));
  return dict_like(value, std::move(mapped));
}

std::string structure_difference(const c10::IValue& expected, const c10::IValue& found, const Path& path) {
  const auto differ = [&] {
    return path.text() + ": found " + describe(found) + ", expected " + describe(expected) + ".";
  };
  if (node_kind(expected) != node_kind(found)) return differ();
  const auto compare_all = [&](c10::ArrayRef<c10::IValue> wanted, c10::ArrayRef<c10::IValue> actual) {
    if (wanted.size() != actual.size()) return differ();
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      std::string difference = structure_difference(wanted[i], actual[i], Path(path, i));
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
    const c10::IValue& key = entry.key();
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
