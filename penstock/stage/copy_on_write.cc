#include "penstock/stage/copy_on_write.h"

#include <ATen/ops/clone.h>
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <cstring>
#include <memory>
#include <utility>

namespace penstock::internal {
namespace {

// Deleter of an alias's DataPtr, whose context is a reference to the source's storage.
void release_source(void* storage) {
  delete static_cast<c10::Storage*>(storage);
}

// Gives the alias memory of its own. StorageImpl calls it before the first write.
void copy_memory(c10::StorageImpl* storage) {
  c10::DataPtr own = c10::GetAllocator(storage->device_type())->allocate(storage->nbytes());
  std::memcpy(own.mutable_get(), storage->data(), storage->nbytes());
  storage->set_data_ptr_noswap(std::move(own));
}

// Number of bytes from the tensor's first element to the end of its last.
std::size_t extent_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  std::int64_t last = 0;
  for (std::int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return static_cast<std::size_t>(last + 1) * tensor.element_size();
}

}  // namespace

bool is_plain(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.has_storage() && !tensor.is_nested() && !tensor.is_quantized() &&
         !tensor.key_set().has(c10::DispatchKey::Python) && !tensor._fw_grad(/*level=*/0).defined();
}

at::Tensor copy_on_write_alias(const at::Tensor& source) {
  const c10::Storage& shared = source.storage();
  if (source.use_count() == 1 && shared.use_count() == 1) return source;
  if (!source.is_cpu()) return at::clone(source.detach());
  auto reference = std::make_unique<c10::Storage>(shared);
  // Nothing writes through this pointer: copy_memory replaces it first.
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast)
  auto* const memory = static_cast<std::byte*>(const_cast<void*>(shared.data()));
  const std::size_t size = extent_of(source);
  const std::size_t first = static_cast<std::size_t>(source.storage_offset()) * source.element_size();
  c10::DataPtr data(size == 0 ? memory : memory + first, reference.get(), release_source, shared.device());
  reference.release();  // NOLINT(bugprone-unused-return-value): the DataPtr owns it now
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), size, std::move(data),
                                                             shared.allocator(), /*resizable=*/false));
  storage.unsafeGetStorageImpl()->set_materializer(copy_memory);
  at::Tensor alias = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), source.key_set(), source.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(source.sizes(), source.strides());
  return alias;
}

at::Tensor copy_on_write_chunk(const at::Tensor& chunk) {
  if (!is_plain(chunk)) return chunk;
  at::Tensor alias = copy_on_write_alias(chunk);
  if (chunk.requires_grad() && !alias.is_same(chunk)) {
    torch::autograd::impl::set_gradient_edge(alias, torch::autograd::impl::gradient_edge(chunk));
  }
  return alias;
}

bool is_copy_on_write_alias(const at::Tensor& tensor) {
  return tensor.has_storage() && tensor.storage().unsafeGetStorageImpl()->has_materializer();
}

}  // namespace penstock::internal
