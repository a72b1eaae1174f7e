// Ranks that are threads of one process: a tensor is handed over and not copied, and nothing listens anywhere.
#pragma once

#include <memory>
#include <vector>

#include "penstock/transport/transport.h"

namespace penstock {

// The ends of `ranks` ranks. They refer to what they share and may be destroyed in any order.
std::vector<std::unique_ptr<Transport>> thread_transports(int ranks);

}  // namespace penstock
