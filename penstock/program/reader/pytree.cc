#include "penstock/program/reader/pytree.h"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/jit_type.h>

#include <algorithm>
#include <cassert>
#include <nlohmann/json.hpp>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/program/error.h"
#include "penstock/program/reader/json.h"
#include "penstock/tensor/nested.h"

namespace penstock::internal {
namespace {

using nlohmann::json;

bool is_key(const json& key) {
  return key.is_string() || key.is_number_integer();
}

bool are_keys(const json& keys, std::size_t count) {
  return keys.is_array() && keys.size() == count && std::all_of(keys.begin(), keys.end(), is_key) &&
         std::all_of(keys.begin(), keys.end(), [&](const json& key) { return key.type() == keys.front().type(); });
}

std::string step_text(const c10::IValue& key) {
  return key.isString() ? key.toStringRef() : std::to_string(key.toInt());
}

}  // namespace

// Builds a TreeSpec from its JSON.
class TreeSpecReader {
 public:
  explicit TreeSpecReader(const std::string& where) : where_(where) {}

  TreeSpec read(const json& node) const {
    if (!node.is_object() || !node.contains("type") || !node.contains("children_spec") ||
        !node["children_spec"].is_array()) {
      throw ProgramError(
          concat(where_, ": found ", node.type_name(), ", expected a node with a type and children_spec."));
    }
    TreeSpec spec;
    const json& type = node["type"];
    if (type.is_null()) return spec;
    if (!type.is_string()) throw ProgramError(where_ + ": the type of a node should be a string.");
    for (const json& child : node["children_spec"]) spec.children_.push_back(read(child));
    spec.leaves_ = 0;
    for (const TreeSpec& child : spec.children_) spec.leaves_ += child.leaves_;
    const auto name = type.get<std::string>();
    if (name == "builtins.tuple" || name == "collections.namedtuple") {
      spec.kind_ = TreeSpec::Kind::Tuple;
    } else if (name == "builtins.list" || name == "collections.deque") {
      spec.kind_ = TreeSpec::Kind::List;
    } else {
      const std::optional<json> keys = keys_of(node, spec.children_.size());
      const bool is_dict =
          name == "builtins.dict" || name == "collections.OrderedDict" || name == "collections.defaultdict";
      if (is_dict && !keys) {
        throw ProgramError(
            concat(where_, ": a ", name, " should have a key for each child, all strings or all integers."));
      }
      // Other registered types become dicts if they name their fields, and tuples otherwise.
      spec.kind_ = keys ? TreeSpec::Kind::Dict : TreeSpec::Kind::Tuple;
      if (keys) {
        for (const json& key : *keys) {
          spec.keys_.emplace_back(key.is_string() ? c10::IValue(key.get<std::string>())
                                                  : c10::IValue(key.get<std::int64_t>()));
        }
      }
    }
    return spec;
  }

 private:
  // Returns the keys in the context of a node. Most contexts are strings that contain JSON: the keys, or a list that
  // contains them.
  std::optional<json> keys_of(const json& node, std::size_t count) const {
    if (!node.contains("context")) return std::nullopt;
    json context = node["context"];
    if (context.is_string()) {
      const auto text = context.get<std::string>();
      if (!json::accept(text)) return std::nullopt;
      context = parse_exported_json(text, where_);
    }
    if (context.is_object() && context.contains("dict_context")) context = context["dict_context"];
    if (are_keys(context, count)) return std::make_optional(context);
    if (context.is_array()) {
      for (const json& part : context) {
        if (are_keys(part, count) && count > 0) return std::make_optional(part);
      }
    }
    return std::nullopt;
  }

  const std::string& where_;
};

TreeSpec TreeSpec::parse(std::string_view text, const std::string& where) {
  const json parsed = parse_exported_json(text, where);
  if (!parsed.is_array() || parsed.size() != 2 || !parsed[0].is_number_integer()) {
    throw ProgramError(where + ": should be a version and a tree.");
  }
  if (parsed[0] != 1) {
    throw ProgramError(concat(where, ": found version ", parsed[0].dump(), ", expected version 1."));
  }
  return TreeSpecReader(where).read(parsed[1]);
}

// Path of a value, for errors. It becomes text only when there is one, since flatten() runs for every microbatch.
struct TreeSpec::Place {
  const Place* parent = nullptr;
  const std::string* root = nullptr;
  const c10::IValue* key = nullptr;
  std::size_t number = 0;

  std::string text() const {
    if (parent == nullptr) return *root;
    return parent->text() + "." + (key == nullptr ? std::to_string(number) : step_text(*key));
  }
};

std::vector<c10::IValue> TreeSpec::flatten(const c10::IValue& value, const std::string& where) const {
  std::vector<c10::IValue> leaves;
  leaves.reserve(leaves_);
  flatten_into(value, {.root = &where}, leaves);
  return leaves;
}

void TreeSpec::flatten_into(const c10::IValue& value, const Place& place, std::vector<c10::IValue>& leaves) const {
  const auto refuse = [&](const std::string& expected) {
    throw ProgramError(concat(place.text(), ": found ", describe(value), ", expected ", expected, "."));
  };
  const auto flatten_all = [&](c10::ArrayRef<c10::IValue> elements, const char* expected) {
    if (elements.size() != children_.size()) refuse(concat(expected, children_.size()));
    for (std::size_t i = 0; i < children_.size(); ++i) {
      children_[i].flatten_into(elements[i], {.parent = &place, .number = i}, leaves);
    }
  };
  switch (kind_) {
    case Kind::Leaf: leaves.push_back(value); return;
    case Kind::Tuple:
      if (!value.isTuple()) refuse(concat("tuple of ", children_.size()));
      flatten_all(value.toTupleRef().elements().asArrayRef(), "tuple of ");
      return;
    case Kind::List:
      if (!value.isList()) refuse(concat("list of ", children_.size()));
      flatten_all(value.toList().vec(), "list of ");
      return;
    case Kind::Dict: break;
  }
  const auto refuse_keys = [&] {
    std::vector<std::string> keys;
    for (const c10::IValue& key : keys_) keys.push_back(key_text(key));
    refuse(keys.empty() ? "empty dict" : concat("dict with ", join(keys)));
  };
  if (!value.isGenericDict() || value.toGenericDict().size() != keys_.size()) refuse_keys();
  const auto dict = value.toGenericDict();
  for (std::size_t i = 0; i < keys_.size(); ++i) {
    const auto found = dict.find(keys_[i]);
    if (found == dict.end()) refuse_keys();
    children_[i].flatten_into(found->value(), {.parent = &place, .key = &keys_[i]}, leaves);
  }
}

c10::IValue TreeSpec::unflatten(std::span<const c10::IValue> values) const {
  assert(values.size() == leaves_);
  return unflatten_from(values);
}

c10::IValue TreeSpec::unflatten_from(std::span<const c10::IValue>& values) const {
  if (kind_ == Kind::Leaf) {
    c10::IValue leaf = values.front();
    values = values.subspan(1);
    return leaf;
  }
  std::vector<c10::IValue> elements;
  elements.reserve(children_.size());
  for (const TreeSpec& child : children_) elements.push_back(child.unflatten_from(values));
  if (kind_ == Kind::Tuple) return c10::ivalue::Tuple::create(std::move(elements));
  if (kind_ == Kind::List) {
    c10::List<c10::IValue> list(c10::AnyType::get());
    for (c10::IValue& element : elements) list.push_back(std::move(element));
    return list;
  }
  const bool numbered = !keys_.empty() && keys_.front().isInt();
  c10::Dict<c10::IValue, c10::IValue> dict(
      numbered ? c10::TypePtr(c10::IntType::get()) : c10::TypePtr(c10::StringType::get()), c10::AnyType::get());
  for (std::size_t i = 0; i < keys_.size(); ++i) dict.insert(keys_[i], std::move(elements[i]));
  return dict;
}

std::vector<std::string> TreeSpec::paths(const std::string& root) const {
  std::vector<std::string> paths;
  paths.reserve(leaves_);
  paths_into(root, paths);
  return paths;
}

void TreeSpec::paths_into(const std::string& root, std::vector<std::string>& paths) const {
  if (kind_ == Kind::Leaf) {
    paths.push_back(root);
    return;
  }
  for (std::size_t i = 0; i < children_.size(); ++i) {
    const std::string step = kind_ == Kind::Dict ? step_text(keys_[i]) : std::to_string(i);
    children_[i].paths_into(root.empty() ? step : root + "." + step, paths);
  }
}

}  // namespace penstock::internal
