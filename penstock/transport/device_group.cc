#include "penstock/transport/device_group.h"

#include <ATen/ops/zeros.h>

#include <utility>

namespace penstock::internal {
namespace {

// The parts of a collective on the CPU and on the device.
class BothWorks : public Work {
 public:
  BothWorks(std::unique_ptr<Work> device, std::unique_ptr<Work> host)
      : device_(std::move(device)), host_(std::move(host)) {}

  void wait(Deadline deadline) override {
    device_->wait(deadline);
    host_->wait(deadline);
  }

 private:
  std::unique_ptr<Work> device_;
  std::unique_ptr<Work> host_;
};

struct Split {
  explicit Split(const std::vector<at::Tensor>& tensors) {
    for (const at::Tensor& tensor : tensors) (tensor.is_cpu() ? host : device).push_back(tensor);
  }
  std::vector<at::Tensor> host;
  std::vector<at::Tensor> device;
};

}  // namespace

void DeviceGroup::wait(const c10::intrusive_ptr<c10d::Work>& work, Deadline deadline) {
  operations_->add({.works = {work},
                    .awaited = StreamPoint::now(device_),
                    .timeout = deadline - Clock::now(),
                    .what = kNotAllHaveArrived});
  try {
    work->synchronize();
  } catch (const std::exception& error) {
    control().throw_connection_lost(TransportError::kNoPeer, error);
  }
}

void DeviceGroup::sum_parts(Collective& collective, const at::Tensor& part, const at::Tensor& whole) {
  if (is_summed_by_backend(whole)) {
    start(collective, [&](c10d::Backend& backend) {
      at::Tensor to = part.view(-1);
      at::Tensor from = whole.view(-1);
      return backend._reduce_scatter_base(to, from);
    });
    return;
  }
  sum_gathered(collective, whole, [part, index = member()](const at::Tensor& sum) {
    part.view(-1).copy_(sum.narrow(0, index * part.numel(), part.numel()));
  });
}

std::unique_ptr<Work> DeviceGroup::barrier() {
  return all_reduce({at::zeros({1}, at::TensorOptions(device_).dtype(at::kByte))});
}

C10dGroup& DirectGroup::group_of(const at::Tensor& tensor) const {
  return tensor.is_cpu() ? *host_ : *device_;
}

std::unique_ptr<Work> DirectGroup::all_reduce(std::vector<at::Tensor> tensors) {
  Split split(tensors);
  auto on_device = device_->all_reduce(std::move(split.device));
  return std::make_unique<BothWorks>(std::move(on_device), host_->all_reduce(std::move(split.host)));
}

std::unique_ptr<Work> DirectGroup::all_gather(at::Tensor whole, at::Tensor part) {
  C10dGroup& group = group_of(part);
  return group.all_gather(std::move(whole), std::move(part));
}

std::unique_ptr<Work> DirectGroup::reduce_scatter(at::Tensor part, at::Tensor whole) {
  C10dGroup& group = group_of(part);
  return group.reduce_scatter(std::move(part), std::move(whole));
}

std::unique_ptr<Work> DirectGroup::broadcast(std::vector<at::Tensor> tensors, int root) {
  Split split(tensors);
  auto on_device = device_->broadcast(std::move(split.device), root);
  return std::make_unique<BothWorks>(std::move(on_device), host_->broadcast(std::move(split.host), root));
}

std::unique_ptr<Work> DirectGroup::barrier() {
  auto on_device = device_->barrier();
  return std::make_unique<BothWorks>(std::move(on_device), host_->barrier());
}

}  // namespace penstock::internal
