// Python's arithmetic on numbers, with which exports compute sizes. It is exact: overflow of 64 bits, and operations
// that raise in Python, throw ProgramError.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <string_view>

#include "penstock/program/graph.h"

namespace penstock::internal {

// Returns the function with this name in exports, such as "_operator.floordiv"; null if there is none.
Arithmetic find_arithmetic(std::string_view name);

// Returns true for an integer, a float or a bool.
bool is_number(const c10::IValue& value);
// Return such a number as an integer or a float.
std::int64_t integer_of(const c10::IValue& value);
double real_of(const c10::IValue& value);

}  // namespace penstock::internal
