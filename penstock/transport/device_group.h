// Collectives of device tensors over a device backend, and groups that use one for them and Gloo for CPU tensors.
#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "penstock/transport/c10d_group.h"
#include "penstock/transport/device_operations.h"
#include "penstock/transport/transport.h"

namespace penstock::internal {

// Takes tensors on one device. Work::wait() makes the current stream wait for the collective, and not the host: if it
// fails, the stream continues with undefined values, and the transport throws from then on.
class DeviceGroup final : public C10dGroup {
 public:
  DeviceGroup(std::shared_ptr<ControlChannel> control, c10::intrusive_ptr<c10d::Backend> backend, at::Device device,
              std::shared_ptr<DeviceOperations> operations)
      : C10dGroup(std::move(control), std::move(backend)), device_(device), operations_(std::move(operations)) {}
  ~DeviceGroup() override { tear_down(); }
  DeviceGroup(const DeviceGroup&) = delete;
  DeviceGroup& operator=(const DeviceGroup&) = delete;

  // Blocks later work of the stream until the earlier work of all members' streams has ended.
  std::unique_ptr<Work> barrier() override;

  // Forgets the collectives in flight, which DeviceOperations ends.
  void tear_down() noexcept override { forget(); }

 protected:
  void wait(const c10::intrusive_ptr<c10d::Work>& work, Deadline deadline) override;
  void sum_parts(Collective& collective, const at::Tensor& part, const at::Tensor& whole) override;

 private:
  const at::Device device_;
  const std::shared_ptr<DeviceOperations> operations_;
};

// Splits collectives between the two. All members have to split them alike, so each tensor is on the CPU of all members
// or on the device of all.
class DirectGroup final : public Group {
 public:
  DirectGroup(std::shared_ptr<C10dGroup> host, std::shared_ptr<DeviceGroup> device)
      : host_(std::move(host)), device_(std::move(device)) {}

  int size() const override { return host_->size(); }
  int member() const override { return host_->member(); }

  std::unique_ptr<Work> all_reduce(std::vector<at::Tensor> tensors) override;
  std::unique_ptr<Work> all_gather(at::Tensor whole, at::Tensor part) override;
  std::unique_ptr<Work> reduce_scatter(at::Tensor part, at::Tensor whole) override;
  std::unique_ptr<Work> broadcast(std::vector<at::Tensor> tensors, int root) override;
  // Completes on the host when all members have called it, and on the device as DeviceGroup::barrier does.
  std::unique_ptr<Work> barrier() override;

 private:
  C10dGroup& group_of(const at::Tensor& tensor) const;

  std::shared_ptr<C10dGroup> host_;
  std::shared_ptr<DeviceGroup> device_;
};

}  // namespace penstock::internal
