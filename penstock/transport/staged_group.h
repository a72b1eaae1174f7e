// Collectives of tensors on devices over a group of the CPU: they are copied to pinned memory, reduced or exchanged
// there, and copied back. The rank's thread waits for other ranks only, and for no device.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "penstock/device/transfer.h"
#include "penstock/transport/c10d_group.h"
#include "penstock/transport/staging_thread.h"
#include "penstock/transport/transport.h"

namespace penstock::internal {

// The first collective with a tensor on a device starts a thread, which then runs all collectives of the group, so that
// their order is the same on all members.
class StagedGroup : public Group {
 public:
  // `group` takes tensors of the CPU.
  explicit StagedGroup(std::shared_ptr<C10dGroup> group) : group_(std::move(group)) {}
  // Ends the collectives in flight with an error, on all members.
  ~StagedGroup() override { stop(); }
  StagedGroup(const StagedGroup&) = delete;
  StagedGroup& operator=(const StagedGroup&) = delete;

  // Ends the collectives in flight with an error, on all members, and joins the thread. No thread calls a collective
  // meanwhile.
  void stop() PENSTOCK_EXCLUDES(mutex_);

  int size() const override { return group_->size(); }
  int member() const override { return group_->member(); }

  std::unique_ptr<Work> all_reduce(std::vector<at::Tensor> tensors) override;
  std::unique_ptr<Work> all_gather(at::Tensor whole, at::Tensor part) override;
  std::unique_ptr<Work> reduce_scatter(at::Tensor part, at::Tensor whole) override;
  std::unique_ptr<Work> broadcast(std::vector<at::Tensor> tensors, int root) override;
  std::unique_ptr<Work> barrier() override;

 private:
  class StagedWork;
  // A tensor of a collective in CPU memory.
  struct OnHost {
    at::Tensor given;
    // The tensor itself if it is on the CPU.
    at::Tensor host;
  };
  using Start = std::function<std::unique_ptr<Work>(Group& group)>;

  // Returns a tensor in CPU memory for one of the collective, with its values from the point that is added to `ready`
  // on if the collective reads it.
  OnHost on_host(const at::Tensor& tensor, bool is_read, StreamPoint& ready);
  // Starts a collective of host tensors at a point. Its wait() copies `results` to where they were given.
  std::unique_ptr<Work> stage(StreamPoint ready, Start start, std::vector<OnHost> results);
  // Starts a collective on the thread, unless the group ends.
  std::unique_ptr<Work> start(const Start& start) PENSTOCK_EXCLUDES(mutex_);
  // True if a collective with these tensors goes through the thread.
  bool must_stage(const std::vector<at::Tensor>& tensors) const;

  std::shared_ptr<C10dGroup> group_;
  CopyStreams copies_;
  // Held while a collective is started, so that the destructor ends all that have been.
  Mutex mutex_;
  bool ending_ PENSTOCK_GUARDED_BY(mutex_) = false;
  // Shared with collectives in flight.
  std::shared_ptr<StagingThread> thread_ = std::make_shared<StagingThread>();
};

}  // namespace penstock::internal
