#include "penstock/stage/borrowed.h"

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

void let_go(void* lender) {
  delete static_cast<c10::Storage*>(lender);
}

// Called before the first write.
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

// True if sizes, strides and memory are all that there is to the tensor, besides its place in the graph.
bool is_plain(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.has_storage() && !tensor.is_nested() && !tensor.is_quantized() &&
         !tensor.key_set().has(c10::DispatchKey::Python) && !tensor._fw_grad(/*level=*/0).defined();
}

}  // namespace

at::Tensor borrow(const at::Tensor& lent) {
  const c10::Storage& lender = lent.storage();
  if (lent.use_count() == 1 && lender.use_count() == 1) return lent;
  if (!lent.is_cpu()) return at::clone(lent.detach());
  auto holder = std::make_unique<c10::Storage>(lender);
  // Written to only after it has become a copy.
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast)
  auto* const memory = static_cast<std::byte*>(const_cast<void*>(lender.data()));
  const std::size_t size = extent_of(lent);
  const std::size_t first = static_cast<std::size_t>(lent.storage_offset()) * lent.element_size();
  c10::DataPtr data(size == 0 ? memory : memory + first, holder.get(), let_go, lender.device());
  holder.release();  // NOLINT(bugprone-unused-return-value): the DataPtr has it now
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), size, std::move(data),
                                                             lender.allocator(), /*resizable=*/false));
  storage.unsafeGetStorageImpl()->set_materializer(copy_memory);
  at::Tensor alias = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), lent.key_set(), lent.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(lent.sizes(), lent.strides());
  return alias;
}

at::Tensor borrow_chunk(const at::Tensor& chunk) {
  if (!is_plain(chunk)) return chunk;
  at::Tensor alias = borrow(chunk);
  if (chunk.requires_grad() && !alias.is_same(chunk)) {
    torch::autograd::impl::set_gradient_edge(alias, torch::autograd::impl::gradient_edge(chunk));
  }
  return alias;
}

bool is_borrowed(const at::Tensor& tensor) {
  return tensor.has_storage() && tensor.storage().unsafeGetStorageImpl()->has_materializer();
}

}  // namespace penstock::internal
