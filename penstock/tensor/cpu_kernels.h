// Prepares the math libraries behind libtorch's CPU operators, so that results depend neither on the alignment of
// tensors in memory nor on which thread computes first, and so that no instruction traps.
//
// Two preparations run when the library is loaded, before the program's first operator:
//
//   - MKL's conditional numerical reproducibility is switched on (AUTO,STRICT). Without it the same product can have
//     other bits when an operand begins a few bytes later. A value of MKL_CBWR that the user has set is left unchanged.
//   - On a machine whose CPU reports AMX although its instructions trap, oneDNN is limited to AVX-512 with bfloat16;
//     otherwise its first bfloat16 product would end the process. A value of ONEDNN_MAX_CPU_ISA that the user has set
//     is left unchanged.
//
// All functions are thread-safe.
#pragma once

#include <optional>
#include <string>

namespace penstock {

// Returns nothing if matrix products in this process are independent of the alignment of their operands, which bitwise
// identical results require. Otherwise returns a sentence that says why they are not.
std::optional<std::string> why_not_reproducible();

// Makes the process's first call of MKL's vector functions (sqrt, tanh, sin, …). While one thread makes that call, a
// call on another thread is accurate to three or four digits only. Pipelines call this before they start rank threads;
// call it before you compute with libtorch on threads of your own.
void prepare_vector_functions();

}  // namespace penstock
