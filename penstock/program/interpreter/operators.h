// Resolves the callees of nodes: operators of the dispatcher, and Python's arithmetic on numbers.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "penstock/program/graph.h"

namespace penstock::internal {

// Returns the function with this name in exports; none if this process does not have it.
std::optional<std::variant<c10::OperatorHandle, Arithmetic>> find_function(std::string_view target);

// Converts an operand to the type of an argument, as torch.ops does: a number becomes a tensor, a float or a list.
Operand adapted(Operand operand, const c10::Argument& argument);
// Returns true if an operand can be an argument of this type. Any other would fail an assertion in libtorch.
bool fits(const Operand& operand, const c10::Type& type, const Graph& graph);

}  // namespace penstock::internal
