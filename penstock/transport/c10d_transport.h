// Creates the transport of c10d.h with a pool that the caller can observe.
#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "penstock/transport/block_pool.h"
#include "penstock/transport/c10d.h"
#include "penstock/transport/transport.h"

namespace penstock::internal {

// Does what c10d_transport() does. Received tensors use memory of `pool`.
std::unique_ptr<Transport> c10d_transport_with_pool(const c10::intrusive_ptr<c10d::Store>& store, int rank, int ranks,
                                                    C10dOptions options, std::shared_ptr<BlockPool> pool);

}  // namespace penstock::internal
