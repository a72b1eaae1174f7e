// What the nodes of an export call: operators of the dispatcher, and Python's own arithmetic on numbers, which sizes are
// computed with.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "penstock/program/graph.h"

namespace penstock::internal {

// By the export's name for it; none for one that is not there.
std::optional<std::variant<c10::OperatorHandle, Arithmetic>> find_function(std::string_view target);

// An operand as an argument of this type takes it: a number becomes a tensor, a float or a list where one is expected.
Operand adapted(Operand operand, const c10::Argument& argument);
// Whether it can be an argument of this type: one that cannot would end in an assertion inside of libtorch.
bool fits(const Operand& operand, const c10::Type& type, const Graph& graph);

}  // namespace penstock::internal
