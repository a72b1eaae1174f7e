// Prepares the math libraries behind libtorch's CPU operators, so that a result does not depend on where a tensor lies in
// memory or on which thread computes first, and so that no instruction is used which the machine forbids.
//
// Two preparations run when the library is loaded, before the program's first operator:
//
//   - MKL's conditional numerical reproducibility is switched on (AUTO,STRICT). Without it the same product gives other
//     bits when an operand begins a few bytes later. An MKL_CBWR that the user has set stays as it is.
//   - On a machine whose CPU names AMX although its instructions trap, oneDNN is limited to AVX-512 with bfloat16.
//     Otherwise its first bfloat16 product would end the process. An ONEDNN_MAX_CPU_ISA that the user has set stays.
//
// All functions are thread-safe.
#pragma once

#include <optional>
#include <string>

namespace penstock {

// Returns why products in this process may depend on the alignment of their operands in memory, as a sentence, or nothing
// when they do not. Bitwise identical results are promised only in the second case.
std::optional<std::string> why_not_reproducible();

// Makes the first call of MKL's vector functions (sqrt, tanh, sin, …). While one thread makes the process's first call, a
// call on another thread is exact to three or four digits only, so this runs before rank threads start.
void prepare_vector_functions();

namespace internal {

// Runs `attempt` in a child process and returns true if it came back, false if a signal ended the child or it took longer
// than a few seconds. `attempt` must be async-signal-safe.
bool survives(void (*attempt)());

// Returns the value for ONEDNN_MAX_CPU_ISA that keeps oneDNN from instructions which trap, or nothing if none is needed.
std::optional<std::string> onednn_limit(bool names_amx, bool (*amx_works)());

}  // namespace internal
}  // namespace penstock
