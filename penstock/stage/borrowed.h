// What a stage received from another thread lies in that one's memory, which must stay as it is. A borrowed tensor is an
// alias that gets memory of its own when somebody first writes into it.
//
// libtorch's own way (_lazy_clone) is not for threads: when two of them let go of the same memory at once, one may lock
// what the other has freed. Here only the borrower's side is copied on writing; the lender's is an ordinary tensor, and
// knows nothing of it.
#pragma once

#include <ATen/core/Tensor.h>

namespace penstock {

// An alias of the tensor without history, or the tensor itself when nobody else has its memory.
at::Tensor borrow(const at::Tensor& lent);

// Whether the tensor's memory is borrowed. Such memory is not lent again: it goes when the borrower writes.
bool is_borrowed(const at::Tensor& tensor);

}  // namespace penstock
