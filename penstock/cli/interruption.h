// Ctrl-C, or the signal of a scheduler that takes the machine away: SIGINT and SIGTERM. Who runs something long catches
// them to end in order.
#pragma once

#include "penstock/transport/processes.h"

namespace penstock::cli {

// Exit code of a process that was interrupted: 130 after SIGINT and 143 after SIGTERM, as shells have it.
int interruption_code();

// The first one is counted, and a second one ends the process at once. Those that come within a moment of each other are
// one: a signal may reach a rank both by itself and from the process that has started it.
void catch_interruptions();
int interruptions();

// While it lives, the first one goes on to these ranks, and a second one kills them.
class PassedOnInterruptions {
 public:
  explicit PassedOnInterruptions(const ProcessRanks& ranks);
  ~PassedOnInterruptions();
  PassedOnInterruptions(const PassedOnInterruptions&) = delete;
  PassedOnInterruptions& operator=(const PassedOnInterruptions&) = delete;
};

}  // namespace penstock::cli
