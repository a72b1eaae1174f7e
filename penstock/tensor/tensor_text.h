// Names and types of tensors as they are shown in errors. nested.h's describe() is for values of any kind.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/base/text.h"

namespace penstock::internal {

// Returns dtype and shape: "float32[2, 3]".
std::string type_text(at::ScalarType dtype, at::IntArrayRef shape);
std::string type_text(const at::Tensor& tensor);

// Like shape_text, for lists that come from a file: shows at most 16 numbers.
template <class Number>
std::string short_list_text(const std::vector<Number>& numbers) {
  constexpr std::size_t kMaxNumbers = 16;
  if (numbers.size() <= kMaxNumbers) return shape_text(numbers);
  return concat('[', join(std::span(numbers).first(kMaxNumbers)), ", …]");
}

// Returns a text in single quotes, on one line: what cannot be printed is escaped, and a long text is cut off.
std::string quoted_text(std::string_view text);

// Returns "tensor 'w'", with the name quoted.
std::string quoted_tensor(std::string_view name);

}  // namespace penstock::internal
