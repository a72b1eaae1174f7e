// Python's arithmetic on numbers, which an export computes sizes with. It is exact: what goes beyond 64 bits, and what
// Python refuses, throws ProgramError.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <string_view>

#include "penstock/program/graph.h"

namespace penstock::internal {

// By the export's name for it, such as "_operator.floordiv"; null for one that is not there.
Arithmetic find_arithmetic(std::string_view name);

// An integer, a float or a bool; and such a number as one of these.
bool is_number(const c10::IValue& value);
std::int64_t integer_of(const c10::IValue& value);
double real_of(const c10::IValue& value);

}  // namespace penstock::internal
