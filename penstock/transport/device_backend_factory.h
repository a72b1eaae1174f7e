// The type of functions that create backends for device tensors, such as NCCL's.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <functional>

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace penstock {

// Creates the backend of a group of `size` ranks for tensors on `device`, which has an index. The ranks find each other
// through the store, in which each group has a prefix of its own. Blocks until all have connected, so ranks create the
// groups that they share in the same order. Throws std::runtime_error.
//
// Messages of the backend have no tags: the receives from a rank are matched with its sends in order. Operations of one
// group run one after the other on its stream. Receives can be posted ahead of sends only if the two use different
// groups, so create one group of two ranks for each direction.
//
// Call abort() before a backend is released, or shutdown() on all ranks at the same time. abort() ends what is in flight
// on this rank only, may be called from any thread, and may block: NCCL's has no timeout.
using DeviceBackendFactory = std::function<c10::intrusive_ptr<c10d::Backend>(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, at::Device device)>;

}  // namespace penstock
