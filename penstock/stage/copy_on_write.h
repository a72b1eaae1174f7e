// Copy-on-write aliases. A tensor that a stage received from another thread rank lies in the sender's memory, which has
// to stay as it is. The stage therefore computes with an alias that shares the storage and gets memory of its own when
// it is first written to.
//
// libtorch's _lazy_clone is not safe between threads: when two threads release the same memory at once, one may lock a
// context that the other has freed. Here only the alias is copied on a write; the source stays an ordinary tensor.
#pragma once

#include <ATen/core/Tensor.h>

namespace penstock::internal {

// True if sizes, strides and storage describe the tensor completely, apart from its place in the autograd graph.
// Sparse, nested and quantized tensors, subclasses and dual tensors are not plain.
bool is_plain(const at::Tensor& tensor);

// Returns an alias of the tensor without history, or the tensor itself when nothing else refers to its storage. The
// alias has a version counter of its own. The first write copies the part of the storage that the tensor covers, no
// more.
at::Tensor copy_on_write_alias(const at::Tensor& source);

// Returns such an alias of a chunk of the caller's batch, whose gradients flow to where those of the chunk would. A
// chunk that is not plain is returned itself.
at::Tensor copy_on_write_chunk(const at::Tensor& chunk);

// True if the tensor's storage is a copy-on-write alias. Such a storage must not be aliased again, because a write to
// the tensor replaces its memory.
bool is_copy_on_write_alias(const at::Tensor& tensor);

}  // namespace penstock::internal
