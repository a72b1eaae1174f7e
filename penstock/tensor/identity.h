// Tells tensors by the memory that they lie in, and by how often they were written to.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace penstock::internal {

// Returns the identity of the tensor's memory: its storage, or the tensor itself if it has none; null if it is undefined.
inline const void* memory_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return nullptr;
  if (tensor.has_storage()) return tensor.storage().unsafeGetStorageImpl();
  return tensor.unsafeGetTensorImpl();
}

// Returns the version, which grows with each write in place that autograd sees; 0 for undefined and inference tensors.
inline std::uint32_t version_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_inference()) return 0;
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

}  // namespace penstock::internal
