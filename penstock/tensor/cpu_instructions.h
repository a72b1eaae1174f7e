// Keeps oneDNN from CPU instructions that trap on this machine.
#pragma once

#include <optional>
#include <string>

namespace penstock::internal {

// Sets ONEDNN_MAX_CPU_ISA on a machine whose CPU reports AMX although its instructions trap, as some virtual machines
// do. Leaves a value that the user has set. Takes effect only before oneDNN's first primitive, which reads the
// variable.
void limit_onednn_instructions();

// Runs `attempt` in a child process. Returns true if it returned, false if a signal ended the child or it took longer
// than a few seconds. `attempt` must be async-signal-safe.
bool survives(void (*attempt)());

// Returns the value for ONEDNN_MAX_CPU_ISA that keeps oneDNN from AMX, or nothing if no limit is needed.
std::optional<std::string> onednn_limit(bool reports_amx, bool (*amx_works)());

}  // namespace penstock::internal
