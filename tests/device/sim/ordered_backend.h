// A c10d::Backend for tensors of the simulated device that has the rules of ProcessGroupNCCL, so that a transport that
// breaks them fails here:
//
// - Tags are ignored. The n-th send of a communicator to a rank meets the n-th receive there.
// - A communicator executes its operations on one stream, one after the other. A send completes only when its receive
//   runs, so a receive that was posted ahead of a send blocks that send until it completes.
// - Without eagerConnectSingleDevice() there is a communicator for each pair of ranks, in both directions, and one for
//   collectives. The first use of each blocks the host until its other ranks come. With it there is one for everything.
// - Work::wait() makes the current stream wait, not the host; of a barrier also the host. Work::wait(timeout) blocks the
//   host, and at the timeout aborts the backend and throws. isCompleted() queries, isSuccess() throws.
// - abort() ends what is in flight; every later use throws. A failure of the connection does the same.
// - A Work keeps its tensors alive until wait() or its destruction. Dropping a tensor and its Work before the operation
//   has run lets the memory be reused.
//
// Where NCCL hangs or gives garbage because ranks disagree about sizes, this reports an error. Supported are send, recv,
// allreduce with sums, broadcast, _allgather_base, _reduce_scatter_base and barrier. Sums are in the order of ranks.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace penstock::sim {

struct OrderedOptions {
  // Time that the first use of a communicator waits for its other ranks.
  std::chrono::milliseconds connect_timeout = std::chrono::seconds(60);
  // Time that an operation may take. NCCL has no such limit; this keeps streams from running for ever.
  std::chrono::milliseconds operation_timeout = std::chrono::minutes(30);
};

// `inner` transfers the bytes between threads or processes: a backend for CPU tensors whose sends and receives match by
// tag, such as Gloo. Nothing else may use it.
c10::intrusive_ptr<c10d::Backend> make_ordered_backend(c10::intrusive_ptr<c10d::Backend> inner, c10::Device device,
                                                       const OrderedOptions& options = {});

// Returns an ordered backend that is not connected. The ranks of a group find each other through the store, which no
// other group may use without a prefix of its own. Blocks until the inner backends have connected. Throws what they
// throw.
c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                               c10::Device device);

// Creates the inner backends of make_backend(). Without it, they are ProcessGroupGloo on loopback.
using InnerBackends =
    std::function<c10::intrusive_ptr<c10d::Backend>(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size)>;
void set_inner_backends(InnerBackends factory);

}  // namespace penstock::sim

extern "C" {
// These are the functions of a plugin of Penstock.

// Returns what make_backend() does, connected, which the caller owns: take it with
// c10::intrusive_ptr<c10d::Backend>::reclaim.
c10d::Backend* penstock_device_backend(c10d::Store* store, int rank, int size, int device_index);
// Sets `id` to the index. Each process has devices of its own, but those with one index count as one, as GPUs would.
void penstock_device_id(int device_index, std::string& id);
}
