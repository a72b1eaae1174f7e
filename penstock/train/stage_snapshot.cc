#include "penstock/train/stage_snapshot.h"

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <set>
#include <utility>

#include "penstock/device/faults.h"

namespace penstock::internal {
namespace {

// A tensor of a stage, and where its copy is to be stored.
struct Source {
  at::Tensor tensor;
  at::Tensor* copy = nullptr;
};

// Returns the storages that forwards of the stages may write to. A parameter may be one of them.
std::set<const void*> written_storages(const TrainedStages& stages) {
  std::set<const void*> written;
  for (const TrainedStage& stage : stages) {
    for (const auto& [name, tensor] : stage.stage->module().written_tensors()) {
      if (tensor.has_storage()) written.insert(tensor.storage().unsafeGetStorageImpl());
    }
  }
  return written;
}

}  // namespace

StageSnapshot::StageSnapshot(const TrainedStages& stages, CopyStreams& streams, Use use) {
  const std::set<const void*> written = written_storages(stages);
  std::vector<Source> of_forwards;
  std::vector<Source> of_updates;
  tensors_.reserve(stages.size());
  for (const TrainedStage& stage : stages) {
    Tensors& copies = tensors_.emplace_back(Tensors{.parameters = stage.stage->parameters(),
                                                    .optimizer = stage.optimizer.state(),
                                                    .buffers = stage.stage->module().buffers});
    for (NamedTensors* const kind : {&copies.parameters, &copies.optimizer, &copies.buffers}) {
      for (auto& [name, tensor] : *kind) {
        tensor = tensor.detach();
        if (!has_streams(tensor.device())) {
          if (use == Use::BesideTraining) tensor = tensor.clone();
          continue;
        }
        const bool is_written = tensor.has_storage() && written.contains(tensor.storage().unsafeGetStorageImpl());
        (is_written ? of_forwards : of_updates).push_back({.tensor = tensor, .copy = &tensor});
      }
    }
  }
  std::vector<at::Tensor> all;
  for (const auto* const sources : {&of_forwards, &of_updates}) {
    for (const Source& source : *sources) all.push_back(source.tensor);
  }
  devices_ = devices_of(all);
  std::map<c10::DeviceIndex, StreamPoint> ready;
  for (const at::Device device : devices_) ready.emplace(device.index(), StreamPoint::now(device));
  // A device copies in one stream, so that what the next forward waits for comes first.
  for (const auto& [sources, point] :
       {std::pair(&of_forwards, &Copied::of_forwards), std::pair(&of_updates, &Copied::of_updates)}) {
    for (const Source& source : *sources) {
      const at::Device device = source.tensor.device();
      *source.copy = DeviceCopy(source.tensor, at::kCPU, ready.at(device.index()), streams).tensor();
    }
    for (const at::Device device : devices_) {
      copied_[device.index()].*point = StreamPoint::after(streams.outgoing(device));
    }
  }
}

void StageSnapshot::block_forwards() const {
  if (!is_injected(Fault::ForwardDuringCopy)) block(&Copied::of_forwards);
}

void StageSnapshot::block_updates() const {
  if (!is_injected(Fault::UpdateDuringCopy)) block(&Copied::of_updates);
}

void StageSnapshot::block(StreamPoint Copied::* point) const {
  for (const at::Device device : devices_) (copied_.at(device.index()).*point).block(device);
}

bool StageSnapshot::wait(Deadline deadline) const {
  for (const auto& [device, copied] : copied_) {
    if (!copied.of_updates.wait(deadline)) return false;
  }
  return true;
}

}  // namespace penstock::internal
