// The argument checks by subject, and the requirements that they share.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>

#include "penstock/program/interpreter/operator_checks.h"

namespace penstock::internal {

using OperatorArguments = std::span<c10::IValue>;

// Checks by "name" for all overloads, or "name.overload" for one; "name." is the overload without a name.
using ArgumentChecks = std::map<std::string_view, ArgumentCheck>;

void add_layer_checks(ArgumentChecks& checks);
void add_linear_algebra_checks(ArgumentChecks& checks);
void add_memory_checks(ArgumentChecks& checks);

// Throws ProgramError with this message unless the condition holds.
void require(bool condition, const std::string& message);
// Requires that all elements of an integer tensor are in [least, most]. Elements on another device than the CPU are
// left to its kernels, which check bounds themselves.
void require_range(const at::Tensor& tensor, std::int64_t least, std::int64_t most, const std::string& name);
// Requires that each element is at least the one before it.
void require_nondecreasing(const at::Tensor& tensor, const std::string& name);

// Returns false for None and for an undefined tensor.
bool has_tensor(const c10::IValue& argument);
// Returns true for a tensor of int32 or int64.
bool is_index(const at::Tensor& tensor);

}  // namespace penstock::internal
