#include "penstock/tensor/tensor_text.h"

#include <nlohmann/json.hpp>

#include "penstock/base/text.h"
#include "penstock/tensor/nested.h"

namespace penstock::internal {

std::string type_text(at::ScalarType dtype, at::IntArrayRef shape) {
  return concat(dtype_name(dtype), shape_text(shape));
}

std::string type_text(const at::Tensor& tensor) {
  return type_text(tensor.scalar_type(), tensor.sizes());
}

std::string quoted_text(std::string_view text) {
  using nlohmann::json;
  constexpr std::size_t kMaxBytes = 200;
  const std::string escaped = json(text.substr(0, kMaxBytes)).dump(-1, ' ', false, json::error_handler_t::replace);
  return concat("'", escaped.substr(1, escaped.size() - 2), text.size() > kMaxBytes ? "…'" : "'");
}

std::string quoted_tensor(std::string_view name) {
  return concat("tensor ", quoted_text(name));
}

}  // namespace penstock::internal
