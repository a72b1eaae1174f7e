// Kernels that allocate, make views, resize and copy.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "tests/device/sim/allocators.h"
#include "tests/device/sim/kernels.h"
#include "tests/device/sim/simulation.h"

namespace penstock::sim {
namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

c10::Device device_or_current(std::optional<at::Device> device) {
  return device && device->has_index() ? *device : c10::Device(kSim, current_device());
}

void check_options(std::optional<at::Layout> layout, std::optional<bool> pinned) {
  TORCH_CHECK(!pinned.value_or(false), "sim: only memory of the host can be pinned");
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "sim: tensors on the device are strided");
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout> layout, std::optional<at::Device> device,
                         std::optional<bool> pinned) {
  check_options(layout, pinned);
  const c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_strided_generic(size, stride, &device_allocator(), kKeys, c10::dtype_or_default(dtype));
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                 std::optional<at::Device> device, std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  check_options(layout, pinned);
  const c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_generic(size, &device_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
                      std::optional<std::int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* const impl = self.unsafeGetTensorImpl();
  if (self.sizes() == size && !format) return self;
  impl->set_sizes_contiguous(size);
  if (format) impl->empty_tensor_restride(*format);
  if (self.numel() == 0) return self;
  const std::size_t bytes = at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.element_size(),
                                                             static_cast<std::size_t>(self.storage_offset()));
  if (bytes > self.storage().nbytes()) resize_storage(*self.storage().unsafeGetStorageImpl(), bytes);
  return self;
}

// Lets `tensor.set_data(other)` move a CPU tensor to the device, and so Module::to.
bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  const auto is_dense = [](const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided && (tensor.is_cpu() || is_on_sim(tensor));
  };
  return is_dense(self) && is_dense(from);
}

// Enqueues the copy. `kept` lives until it is done.
void enqueue_copy(const c10::Stream& stream, const char* name, const at::Tensor& to, const at::Tensor& from,
                  at::Tensor kept = {}) {
  const at::Tensor target = host_view(to, /*writes=*/true);
  Simulation::get().launch(stream, name, {{&from, false}, {&to, true}},
                           [target, source = host_view(from), kept = std::move(kept)] { target.copy_(source); });
}

void copy_between_devices(const at::Tensor& from, const at::Tensor& to) {
  Simulation& simulation = Simulation::get();
  const c10::Stream source = current_stream(from.device().index());
  const c10::Stream target = current_stream(to.device().index());
  // As on CUDA, the copy runs on the source's stream, after and before all other work on both.
  if (source != target) simulation.block(source, simulation.record(target));
  enqueue_copy(source, "copy between devices", to, from);
  if (source != target) simulation.block(target, simulation.record(source));
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, /*non_blocking=*/false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  Simulation& simulation = Simulation::get();
  const c10::Stream stream = current_stream(self.device().index());
  simulation.launch(stream, "item", {{&self, false}}, [] {});
  simulation.wait(stream);
  return host_view(self).item();
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  device_allocator().recordStream(self.storage().data_ptr(), stream);
}

}  // namespace

at::Tensor host_view(const at::Tensor& tensor, bool writes) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  const void* const address = writes ? tensor.mutable_data_ptr() : tensor.const_data_ptr();
  void* const pointer = Simulation::get().kernel_address(address);
  at::Tensor view = at::from_blob(pointer, tensor.sizes(), tensor.strides(), options);
  if (tensor.is_conj()) view = view.conj();
  if (tensor.is_neg()) view = view._neg_view();
  return view;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  Simulation& simulation = Simulation::get();
  simulation.count_copy();
  if (to.numel() == 0) return to;
  if (is_on_sim(from) && is_on_sim(to)) {
    copy_between_devices(from, to);
  } else if (is_on_sim(to)) {
    const c10::Stream stream = current_stream(to.device().index());
    if (simulation.is_pinned(from.const_data_ptr())) {
      enqueue_copy(stream, "copy to the device", to, from);
    } else {
      // CUDA stages pageable memory before it returns.
      const at::Tensor staged = from.detach().clone();
      enqueue_copy(stream, "copy to the device", to, staged, staged);
    }
    if (!non_blocking) simulation.wait(stream);
  } else {
    const c10::Stream stream = current_stream(from.device().index());
    enqueue_copy(stream, "copy to the host", to, from);
    if (!non_blocking || !simulation.is_pinned(to.const_data_ptr())) simulation.wait(stream);
  }
  return to;
}

void copy_bytes(c10::Device device, const char* name, void* to, const void* from, std::size_t bytes) {
  Simulation& simulation = Simulation::get();
  const auto tensor_at = [&](void* pointer) {
    const auto options = at::TensorOptions().dtype(at::kByte).device(device);
    return at::from_blob(pointer, {static_cast<std::int64_t>(bytes)}, options);
  };
  const at::Tensor source = tensor_at(const_cast<void*>(from));  // NOLINT(cppcoreguidelines-pro-type-const-cast)
  const at::Tensor target = tensor_at(to);
  simulation.launch(current_stream(device.index()), name, {{&source, false}, {&target, true}},
                    [to = simulation.kernel_address(to), from = simulation.kernel_address(from), bytes] {
                      std::memcpy(to, from, bytes);
                    });
}

void resize_storage(c10::StorageImpl& storage, std::size_t bytes) {
  const c10::DeviceGuard guard(storage.device());
  c10::DataPtr resized = device_allocator().allocate(bytes);
  const std::size_t kept = std::min(bytes, storage.nbytes());
  if (kept > 0) copy_bytes(storage.device(), "resize of a storage", resized.get(), storage.data(), kept);
  storage.set_data_ptr_noswap(std::move(resized));
  storage.set_nbytes(bytes);
}

void register_memory_kernels(torch::Library& library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("view_as_real", at::native::view_as_real);
  library.impl("view_as_complex", at::native::view_as_complex);
  library.impl("resize_", resize_);
  library.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  library.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(at::native::set_));
  library.impl("set_.source_Tensor", at::native::set_tensor_);
  library.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar_dense);
  library.impl("record_stream", record_stream);
}

}  // namespace penstock::sim
