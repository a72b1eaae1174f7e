// The collectives of some ranks over a c10d::Backend of their own.
#pragma once

#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "penstock/transport/control_channel.h"
#include "penstock/transport/transport.h"

namespace penstock::internal {

class C10dGroup : public Group, public std::enable_shared_from_this<C10dGroup> {
 public:
  // `backend` is null for a group of one.
  C10dGroup(std::shared_ptr<ControlChannel> control, c10::intrusive_ptr<c10d::Backend> backend);
  ~C10dGroup() override;
  C10dGroup(const C10dGroup&) = delete;
  C10dGroup& operator=(const C10dGroup&) = delete;

  int size() const override { return backend_ ? backend_->getSize() : 1; }
  int member() const override { return backend_ ? backend_->getRank() : 0; }

  // Small tensors, and those of types that the backend has no sum for, are added up in the order of members; others in
  // an order of the backend's.
  std::unique_ptr<Work> all_reduce(std::vector<at::Tensor> tensors) override;
  std::unique_ptr<Work> all_gather(at::Tensor whole, at::Tensor part) override;
  std::unique_ptr<Work> reduce_scatter(at::Tensor part, at::Tensor whole) override;
  std::unique_ptr<Work> broadcast(std::vector<at::Tensor> tensors, int root) override;
  std::unique_ptr<Work> barrier() override;

  // Ends the collectives that are under way, with an error on all members.
  void tear_down() noexcept;

 private:
  class Collective;

  template <class Begin>
  void begin(Collective& collective, const Begin& begin_one);
  void sum_by_gathering(Collective& collective, std::vector<at::Tensor> tensors);
  void sum_by_backend(Collective& collective, const at::Tensor& tensor);
  void wait(c10d::Work& work, Deadline deadline);

  std::shared_ptr<ControlChannel> control_;
  // A backend is for one thread at a time; tear_down is another's.
  std::mutex mutex_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  // Those that may not have ended.
  std::vector<c10::intrusive_ptr<c10d::Work>> begun_;
};

}  // namespace penstock::internal
