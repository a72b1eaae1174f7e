#include "penstock/program/graph.h"

#include <c10/core/ScalarType.h>

#include <limits>

#include "penstock/base/text.h"
#include "penstock/tensor/nested.h"

namespace penstock {

using internal::concat;
using internal::join;

namespace {

std::int64_t product(std::int64_t left, std::int64_t right) {
  std::int64_t result = 0;
  return __builtin_mul_overflow(left, right, &result) ? std::numeric_limits<std::int64_t>::max() : result;
}

}  // namespace

std::int64_t TensorType::numel() const {
  std::int64_t numel = 1;
  for (const Dimension& size : sizes) numel = product(numel, size.example);
  return numel;
}

std::int64_t TensorType::bytes() const {
  return product(numel(), static_cast<std::int64_t>(c10::elementSize(dtype)));
}

std::string to_string(const TensorType& type) {
  std::vector<std::string> sizes;
  for (const Dimension& size : type.sizes) {
    sizes.push_back(size.is_fixed() ? std::to_string(size.example) : size.expression.text);
  }
  return concat(dtype_name(type.dtype), "[", join(sizes), "]");
}

std::string Node::operator_name() const {
  const auto* handle = std::get_if<c10::OperatorHandle>(&function);
  return handle == nullptr ? "" : handle->operator_name().name;
}

std::string describe(const Graph& graph, const Node& node) {
  std::string text = concat("node '", node.name, "' (", node.target, ")");
  if (node.call >= 0) {
    const ModuleCall& call = graph.calls[static_cast<std::size_t>(node.call)];
    text += call.path.empty() ? " of the model itself" : concat(" of module '", call.path, "'");
    if (!call.type.empty()) text += concat(" (", call.type, ")");
  }
  return text;
}

}  // namespace penstock
