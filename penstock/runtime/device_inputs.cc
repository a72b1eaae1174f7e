#include "penstock/runtime/device_inputs.h"

#include <algorithm>

#include "penstock/base/text.h"
#include "penstock/device/streams.h"
#include "penstock/tensor/nested.h"
#include "penstock/transport/transport.h"

namespace penstock::internal {
namespace {

// Calls visit(tensor) for each defined tensor of a value.
template <class Visit>
void for_each_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
    return;
  }
  if (!value.isPtrType()) return;
  for (const at::Tensor& tensor : extract_tensor_args(value)) {
    if (tensor.defined()) visit(tensor);
  }
}

bool is_on(const c10::IValue& value, at::Device device) {
  bool found = true;
  for_each_tensor(value, [&](const at::Tensor& tensor) { found = found && tensor.device() == device; });
  return found;
}

}  // namespace

void DeviceInputs::begin_step(const StepInputs& inputs) {
  inputs_ = &inputs;
  repeated_.reset();
  copies_.clear();
  copied_from_host_ = {};
}

void DeviceInputs::end_step(Deadline deadline) {
  copies_.clear();
  if (copied_from_host_.wait(deadline)) return;
  throw TransportError(TransportError::Why::Timeout, TransportError::kNoPeer,
                       "the arguments have not been copied to the device within the deadline");
}

std::optional<c10::IValue> DeviceInputs::moved(const c10::IValue& value, at::Device device, Deadline deadline) {
  if (is_on(value, device)) return std::nullopt;
  return map_leaves(value, [&](const c10::IValue& leaf) -> c10::IValue {
    const bool is_tensor = leaf.isTensor() && leaf.toTensor().defined();
    return is_tensor ? move(leaf.toTensor(), device, deadline) : leaf;
  });
}

std::optional<Args> DeviceInputs::moved(const Args& args, at::Device device, Deadline deadline) {
  std::optional<Args> result;
  for (std::size_t i = 0; i < args.size(); ++i) {
    std::optional<c10::IValue> value = moved(args[i], device, deadline);
    if (!value) continue;
    if (!result) result = args;
    (*result)[i] = *std::move(value);
  }
  return result;
}

std::optional<Kwargs> DeviceInputs::moved(const Kwargs& kwargs, at::Device device, Deadline deadline) {
  std::optional<Kwargs> result;
  for (const auto& [name, given] : kwargs) {
    std::optional<c10::IValue> value = moved(given, device, deadline);
    if (!value) continue;
    if (!result) result = kwargs;
    (*result)[name] = *std::move(value);
  }
  return result;
}

at::Tensor DeviceInputs::move(const at::Tensor& tensor, at::Device device, Deadline deadline) {
  if (tensor.device() == device) return tensor;
  const bool repeated = is_repeated(tensor);
  const std::pair key{static_cast<const void*>(tensor.unsafeGetTensorImpl()), device.index()};
  if (const auto found = copies_.find(key); repeated && found != copies_.end()) return found->second;
  const bool is_on_host = !has_streams(tensor.device());
  DeviceCopy copy(tensor, device, is_on_host ? StreamPoint() : inputs_->caller, is_on_host ? from_host_ : from_devices_,
                  /*keeps_history=*/tensor.requires_grad());
  if (is_on_host) copied_from_host_.add(copy.done());
  const at::Tensor result = copy.take(deadline);
  if (!result.defined()) {
    throw TransportError(TransportError::Why::Timeout, TransportError::kNoPeer,
                         concat("an argument has not come from ", tensor.device().str(), " within the deadline"));
  }
  if (repeated) copies_.emplace(key, result);
  return result;
}

bool DeviceInputs::is_repeated(const at::Tensor& tensor) {
  if (!repeated_) {
    repeated_.emplace();
    std::unordered_set<const void*> seen;
    for (const Batch& batch : inputs_->microbatches) {
      std::unordered_set<const void*> here;
      const auto add = [&](const at::Tensor& found) { here.insert(found.unsafeGetTensorImpl()); };
      for (const c10::IValue& value : batch.args) for_each_tensor(value, add);
      for (const auto& [stage, kwargs] : batch.kwargs) {
        for (const auto& [name, value] : kwargs) for_each_tensor(value, add);
      }
      for_each_tensor(batch.target, add);
      for (const void* const found : here) {
        if (!seen.insert(found).second) repeated_->insert(found);
      }
    }
    for (const auto& [name, value] : inputs_->options->loss_kwargs) {
      for_each_tensor(value, [&](const at::Tensor& found) { repeated_->insert(found.unsafeGetTensorImpl()); });
    }
  }
  return repeated_->contains(tensor.unsafeGetTensorImpl());
}

}  // namespace penstock::internal
