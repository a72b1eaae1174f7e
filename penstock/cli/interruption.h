// Handles SIGINT (Ctrl-C) and SIGTERM (a job scheduler that ends the job), so that a long command can stop in order.
//
// Signals that arrive within 250 ms of each other count as one: a rank may get a signal both from the terminal and from
// the process that has started it.
#pragma once

#include "penstock/transport/processes.h"

namespace penstock::internal::cli {

// Returns the exit code after an interruption: 130 for SIGINT and 143 for SIGTERM, by the convention of shells.
int interruption_code();

// Installs the handler. The first interruption is only counted; a second one ends the process at once.
void catch_interruptions();
// Returns the number of interruptions so far. A long command polls it.
int interruptions();

// Forwards the first interruption to these process ranks, and kills them on a second one, for as long as it lives.
// There is at most one at a time.
class ForwardedInterruptions {
 public:
  explicit ForwardedInterruptions(const ProcessRanks& ranks);
  ~ForwardedInterruptions();
  ForwardedInterruptions(const ForwardedInterruptions&) = delete;
  ForwardedInterruptions& operator=(const ForwardedInterruptions&) = delete;
};

}  // namespace penstock::internal::cli
