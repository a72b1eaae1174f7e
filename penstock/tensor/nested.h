// Nested values: what arguments, keyword arguments, targets and outputs are made of. A value is a c10::IValue: a tuple
// (also a named one), a list or a dict of values, or a leaf: a tensor, a number, a string, None, a block mask or any
// other object.
//
//   c10::IValue value = c10::ivalue::Tuple::create({x, dict});
//   for (const c10::IValue& leaf : flatten_args(value)) …
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace penstock {

// The way to a part of a value, such as kwargs['mask'][1]. It is made on the stack while a value is walked, refers to
// the way that it continues, and becomes text only in an error.
class Path {
 public:
  explicit Path(std::string_view root) : step_(root) {}
  Path(const Path& parent, std::size_t index) : parent_(&parent), step_(index) {}
  Path(const Path& parent, const c10::IValue& key) : parent_(&parent), step_(&key) {}

  std::string text() const;

 private:
  const Path* parent_ = nullptr;
  std::variant<std::string_view, std::size_t, const c10::IValue*> step_;
};

// An object that can be a leaf and says in a few words what it is.
class DescribedObject : public torch::CustomClassHolder {
 public:
  virtual std::string description() const = 0;
};

// A key of a dict as one would write it: 'mask', 3.
std::string key_text(const c10::IValue& key);

// As Python has it, which is how users know it: "float32".
std::string dtype_name(at::ScalarType dtype);

enum class NodeKind { Leaf, Tuple, List, Dict };
NodeKind node_kind(const c10::IValue& value);

// A value in a few words, for errors: "float32 tensor of shape [2, 3]", "int 5", "tuple of 2", "dict with 'a', 'b'".
std::string describe(const c10::IValue& value);

// Calls visit(leaf, path) for each leaf in order: tuples and lists by index, dicts in the order of insertion.
void for_each_leaf(const c10::IValue& value, const Path& path,
                   const std::function<void(const c10::IValue&, const Path&)>& visit);

// The same structure with map(leaf) in place of each leaf, called in the order of for_each_leaf. Lists and dicts keep
// their element types where the new elements are of these, and may hold anything otherwise.
c10::IValue map_leaves(const c10::IValue& value, const std::function<c10::IValue(const c10::IValue&)>& map);

// How two values' structures differ first, as a sentence with the path; empty when they do not. Leaves are not compared.
std::string structure_difference(const c10::IValue& expected, const c10::IValue& found, const Path& path);

// All leaves, in order.
std::vector<c10::IValue> flatten_args(const c10::IValue& value);

struct DetachedArgs {
  // The same structure, with its tensors detached and requires_grad as it was.
  c10::IValue value;
  // Its leaves.
  std::vector<c10::IValue> leaves;
};
DetachedArgs flatten_args_detach(const c10::IValue& value);

// The tensors among the leaves, in order.
std::vector<at::Tensor> extract_tensor_args(const c10::IValue& value);

}  // namespace penstock
