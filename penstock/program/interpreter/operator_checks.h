// Checks of arguments that libtorch's kernels trust: with other arguments they access memory out of bounds or terminate
// the process. They were found by calling operators with random arguments on guarded memory
// (tests/program/operator_fuzz.cc).
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/operator_name.h>

#include <span>

namespace penstock::internal {

// Throws ProgramError for arguments that the operator must not be called with. May replace an argument by an equal one
// that is safe, such as a contiguous copy. The arguments are those of the operator's schema.
using ArgumentCheck = void (*)(std::span<c10::IValue> arguments);

// Returns the check of an operator, or null if it needs none.
ArgumentCheck find_argument_check(const c10::OperatorName& name);

}  // namespace penstock::internal
