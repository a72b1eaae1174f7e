// What a stage received from another thread lies in that one's memory, which must stay as it is. A borrowed tensor is an
// alias that gets memory of its own when somebody first writes into it.
//
// libtorch's own way (_lazy_clone) is not for threads: when two of them let go of the same memory at once, one may lock
// what the other has freed. Here only the borrower's side is copied on writing; the lender's is an ordinary tensor, and
// knows nothing of it.
#pragma once

#include <ATen/core/Tensor.h>

namespace penstock::internal {

// Returns an alias of the tensor without history, or the tensor itself when nobody else has its memory. The alias has a
// version counter of its own, and a write copies the part of the lender's memory that the tensor covers, no more.
at::Tensor borrow(const at::Tensor& lent);

// The same for a chunk of the caller's batch: gradients of the alias flow to where those of the chunk would. What has no
// plain memory to alias (sparse, nested and quantized tensors, subclasses) is returned as it is.
at::Tensor borrow_chunk(const at::Tensor& chunk);

// Whether the tensor's memory is borrowed. Such memory is not lent again: it goes when the borrower writes.
bool is_borrowed(const at::Tensor& tensor);

}  // namespace penstock::internal
