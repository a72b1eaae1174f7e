// The collectives of a group of process ranks, over a c10d::Backend of the group.
#pragma once

#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "penstock/base/mutex.h"
#include "penstock/transport/control_channel.h"
#include "penstock/transport/transport.h"

namespace penstock::internal {

// One thread starts and waits for collectives; tear_down() may be called from any thread.
//
// Lock order: mutex_ before the locks of the control channel.
class C10dGroup : public Group, public std::enable_shared_from_this<C10dGroup> {
 public:
  // `backend` is null for a group of one rank.
  C10dGroup(std::shared_ptr<ControlChannel> control, c10::intrusive_ptr<c10d::Backend> backend);
  ~C10dGroup() override;
  C10dGroup(const C10dGroup&) = delete;
  C10dGroup& operator=(const C10dGroup&) = delete;

  int size() const override { return backend_ ? backend_->getSize() : 1; }
  int member() const override { return backend_ ? backend_->getRank() : 0; }

  // Sums small tensors, and tensors of dtypes that the backend cannot sum, in the order of members; other tensors in
  // the order of the backend's algorithm.
  std::unique_ptr<Work> all_reduce(std::vector<at::Tensor> tensors) override;
  std::unique_ptr<Work> all_gather(at::Tensor whole, at::Tensor part) override;
  std::unique_ptr<Work> reduce_scatter(at::Tensor part, at::Tensor whole) override;
  std::unique_ptr<Work> broadcast(std::vector<at::Tensor> tensors, int root) override;
  std::unique_ptr<Work> barrier() override;

  // Throws the reason of an abort.
  void throw_if_aborted() { control_->throw_if_aborted(); }
  // Ends the collectives in flight with an error, on all members.
  virtual void tear_down() noexcept PENSTOCK_EXCLUDES(mutex_);

 protected:
  class Collective;

  static constexpr const char* kNotAllHaveArrived = "not all ranks of a group have arrived";

  ControlChannel& control() { return *control_; }
  // Returns true if the backend sums such a tensor, in an order of its own.
  static bool is_summed_by_backend(const at::Tensor& tensor);
  // Blocks until an operation has completed.
  virtual void wait(const c10::intrusive_ptr<c10d::Work>& work, Deadline deadline);
  // Starts the sum of the members' contiguous tensors, of which each member gets its part.
  virtual void sum_parts(Collective& collective, const at::Tensor& part, const at::Tensor& whole);
  // Gathers the members' contiguous tensors, sums them in the order of members, and calls use(sum) in wait().
  void sum_gathered(Collective& collective, const at::Tensor& contribution, std::function<void(const at::Tensor&)> use);
  // Starts one operation of the backend as part of the collective.
  using StartOn = std::function<c10::intrusive_ptr<c10d::Work>(c10d::Backend& backend)>;
  void start(Collective& collective, const StartOn& start_on) PENSTOCK_EXCLUDES(mutex_);
  // Releases the operations in flight.
  void forget() noexcept PENSTOCK_EXCLUDES(mutex_);

 private:
  void sum_by_gathering(Collective& collective, std::vector<at::Tensor> tensors);
  void sum_by_backend(Collective& collective, const at::Tensor& tensor);

  std::shared_ptr<ControlChannel> control_;
  // Serialises operations on the backend, which is not thread-safe: tear_down() may be called from another thread.
  Mutex mutex_;
  // The pointer is constant; its size and rank are read without the lock.
  const c10::intrusive_ptr<c10d::Backend> backend_;
  // Operations that may not have completed.
  std::vector<c10::intrusive_ptr<c10d::Work>> in_flight_ PENSTOCK_GUARDED_BY(mutex_);
};

}  // namespace penstock::internal
