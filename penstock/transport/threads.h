// The transport of thread ranks, which are threads of one process: tensors are moved by their handles and never copied,
// and nothing listens on a port.
#pragma once

#include <memory>
#include <vector>

#include "penstock/transport/transport.h"

namespace penstock {

// Returns the transports of all ranks, in their order. They share their state and may be destroyed in any order. Each
// belongs to the thread of its rank. Throws std::invalid_argument for more than 65536 ranks.
std::vector<std::unique_ptr<Transport>> thread_transports(int ranks);

}  // namespace penstock
