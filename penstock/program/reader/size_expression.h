// A size as an export writes it, in sympy's own form: "Mul(Integer(2), Symbol('s77', positive=True, integer=True))".
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace penstock::internal {

struct SizeExpression {
  // factor * symbol + offset; no symbol for a number.
  struct Linear {
    std::string symbol = {};
    std::int64_t factor = 0;
    std::int64_t offset = 0;
  };

  // As people write it: "2*s77".
  std::string text;
  // None for one that is of another form.
  std::optional<Linear> linear;
};

// What is not in that form stays the text that it is.
SizeExpression read_size_expression(std::string_view text);

}  // namespace penstock::internal
