#include "penstock/stage/borrowed.h"

#include <ATen/ops/clone.h>
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>

#include <cstring>
#include <memory>
#include <utility>

namespace penstock {
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

}  // namespace

at::Tensor borrow(const at::Tensor& lent) {
  const c10::Storage& lender = lent.storage();
  if (lent.use_count() == 1 && lender.use_count() == 1) return lent;
  if (!lent.is_cpu()) return at::clone(lent.detach());
  auto holder = std::make_unique<c10::Storage>(lender);
  // Written to only after it has become a copy.
  void* memory = const_cast<void*>(lender.data());  // NOLINT(cppcoreguidelines-pro-type-const-cast)
  c10::DataPtr data(memory, holder.get(), let_go, lender.device());
  holder.release();  // NOLINT(bugprone-unused-return-value): the DataPtr has it now
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), lender.nbytes(),
                                                             std::move(data), lender.allocator(),
                                                             /*resizable=*/false));
  storage.unsafeGetStorageImpl()->set_materializer(copy_memory);
  at::Tensor alias = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), lent.key_set(), lent.dtype());
  c10::TensorImpl& impl = *alias.unsafeGetTensorImpl();
  impl.set_storage_offset(lent.storage_offset());
  impl.set_sizes_and_strides(lent.sizes(), lent.strides());
  return alias;
}

bool is_borrowed(const at::Tensor& tensor) {
  return tensor.has_storage() && tensor.storage().unsafeGetStorageImpl()->has_materializer();
}

}  // namespace penstock
