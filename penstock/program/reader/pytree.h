// A pytree specification, as in torch.utils._pytree: the nesting of a program's inputs or outputs, with leaves in a
// fixed order.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace penstock::internal {

class TreeSpec {
 public:
  enum class Kind { Leaf, Tuple, List, Dict };

  // Parses the output of treespec_dumps. Throws ProgramError, which begins with `where`.
  static TreeSpec parse(std::string_view text, const std::string& where);

  Kind kind() const { return kind_; }
  // Returns the number of leaves.
  std::size_t leaves() const { return leaves_; }
  const std::vector<TreeSpec>& children() const { return children_; }
  // Returns the keys of a dict, one for each child.
  const std::vector<c10::IValue>& keys() const { return keys_; }

  // Returns the leaves of a value in order. Throws ProgramError if its structure differs; `where` names the value in
  // the message. The keys of a dict may be in any order.
  std::vector<c10::IValue> flatten(const c10::IValue& value, const std::string& where) const;
  // Returns the value with these leaves.
  c10::IValue unflatten(std::span<const c10::IValue> values) const;
  // Returns the path of each leaf, such as "args.0" or "kwargs.mask", below `root`.
  std::vector<std::string> paths(const std::string& root) const;

 private:
  struct Place;
  void flatten_into(const c10::IValue& value, const Place& place, std::vector<c10::IValue>& leaves) const;
  c10::IValue unflatten_from(std::span<const c10::IValue>& values) const;
  void paths_into(const std::string& root, std::vector<std::string>& paths) const;

  Kind kind_ = Kind::Leaf;
  std::vector<TreeSpec> children_;
  std::vector<c10::IValue> keys_;
  std::size_t leaves_ = 1;

  friend class TreeSpecReader;
};

}  // namespace penstock::internal
