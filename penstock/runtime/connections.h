// Connects the ranks of this process with each other and with those of other processes.
#pragma once

#include "penstock/runtime/local_ranks.h"

namespace penstock::internal {

// Sets transport, groups and sums of each local rank. Thread ranks get new transports, with nothing in flight, so that
// a pipeline can continue after a failed step; synchronised and shared parameters then continue with groups of the same
// members.
void connect_ranks(LocalRanks& ranks);

}  // namespace penstock::internal
