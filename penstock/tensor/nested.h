// Nested values, the type of arguments, keyword arguments, targets and outputs. A value is a c10::IValue: a tuple
// (named or not), a list or a dict of values, or a leaf, which is a tensor, a number, a string, None, a block mask or
// any other object. All functions are thread-safe for values that no other thread modifies.
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

// The path to a part of a value, such as kwargs['mask'][1]. A path is built on the stack while a value is traversed,
// refers to its parent, which must outlive it, and is converted to text only for an error.
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

// Base class of objects that can be leaves and have a description for errors.
class DescribedObject : public torch::CustomClassHolder {
 public:
  virtual std::string description() const = 0;
};

// Returns a key of a dict as it is written in Python: 'mask', 3.
std::string key_text(const c10::IValue& key);

// Returns the name of a dtype in Python, such as "float32".
std::string dtype_name(at::ScalarType dtype);

enum class NodeKind { Leaf, Tuple, List, Dict };
NodeKind node_kind(const c10::IValue& value);

// Returns a short description of a value for errors: "float32 tensor of shape [2, 3]", "int 5", "tuple of 2",
// "dict with 'a', 'b'".
std::string describe(const c10::IValue& value);

// Calls visit(leaf, path) for each leaf in order: tuples and lists by index, dicts in the order of insertion.
void for_each_leaf(const c10::IValue& value, const Path& path,
                   const std::function<void(const c10::IValue&, const Path&)>& visit);

// Returns the same structure with map(leaf) in place of each leaf, called in the order of for_each_leaf. Lists and
// dicts keep their element type if the new elements have it, and have elements of type Any otherwise.
c10::IValue map_leaves(const c10::IValue& value, const std::function<c10::IValue(const c10::IValue&)>& map);

// Returns the first difference between the structures of two values as a sentence with its path, or an empty text.
// Leaves are not compared.
std::string structure_difference(const c10::IValue& expected, const c10::IValue& found, const Path& path);

// Returns all leaves in order.
std::vector<c10::IValue> flatten_args(const c10::IValue& value);

struct DetachedArgs {
  // The same structure, with detached tensors that keep requires_grad.
  c10::IValue value;
  // The leaves of `value`.
  std::vector<c10::IValue> leaves;
};
DetachedArgs flatten_args_detach(const c10::IValue& value);

// Returns the tensors among the leaves, in order.
std::vector<at::Tensor> extract_tensor_args(const c10::IValue& value);

}  // namespace penstock
