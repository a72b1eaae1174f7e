// Reads a size as exports write it, in sympy's srepr: "Mul(Integer(2), Symbol('s77', positive=True, integer=True))".
#pragma once

#include <string_view>

#include "penstock/program/graph.h"

namespace penstock::internal {

// Returns the expression. A text that is not in that form becomes the expression's text, without a linear form.
SizeExpression read_size_expression(std::string_view text);

}  // namespace penstock::internal
