// Receives of bytes in CPU memory: the data of messages between CPUs, and the metadata of all messages.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <string_view>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "penstock/base/mutex.h"
#include "penstock/transport/block_pool.h"
#include "penstock/transport/control_channel.h"
#include "penstock/transport/wire.h"

namespace penstock::internal {

// One process group for channels with even numbers and one for the others, so that activations and gradients do not
// wait for each other.
struct DataBackends {
  std::array<c10::intrusive_ptr<c10d::Backend>, 2> backends;
  // Serialises what the rank's thread and the staging thread start. A leaf lock.
  Mutex mutex = {};

  c10d::Backend& of(Tag tag) { return *backends[tag.channel % 2]; }
};

struct HostReceive {
  at::Tensor bytes;
  // Null before the receive is posted, and after it has completed.
  c10::intrusive_ptr<c10d::Work> work;

  std::string_view text() const { return {static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes()}; }
};

// The receives of a header. The rest is posted when the first part tells its size.
struct HeaderReceive {
  HostReceive first;
  HostReceive rest;
};

// Used by the rank's thread only.
class HostReceives {
 public:
  // The references must outlive the object.
  HostReceives(ControlChannel& control, DataBackends& backends, TransportStep& step, std::shared_ptr<BlockPool> pool)
      : control_(control), backends_(backends), step_(step), pool_(std::move(pool)) {}

  HostReceive post(int from, Tag tag, MessageKind kind, const at::Tensor& bytes);
  HostReceive post(int from, Tag tag, MessageKind kind, std::size_t bytes) {
    return post(from, tag, kind, pool_->empty_bytes(bytes));
  }
  HeaderReceive post_header(int from, Tag tag) { return {post(from, tag, MessageKind::Header, kHeaderBytes), {}}; }
  // Block until the bytes have arrived, also if they have been waited for. After a timeout a call may be repeated.
  void wait(HostReceive& receive, int from, Deadline deadline);
  Metas wait(HeaderReceive& header, int from, Tag tag, Deadline deadline);
  // Frees what has completed. Call it when the rank's thread has something else to do.
  void free_completed() { completed_.clear(); }

  BlockPool& pool() { return *pool_; }

 private:
  ControlChannel& control_;
  DataBackends& backends_;
  TransportStep& step_;
  std::shared_ptr<BlockPool> pool_;
  // Completed receives, kept until the next call. Gloo's thread releases a receive shortly after it has completed it; a
  // destructor that runs in that moment yields the core, and gets it back much later on a busy machine.
  std::vector<c10::intrusive_ptr<c10d::Work>> completed_;
};

}  // namespace penstock::internal
