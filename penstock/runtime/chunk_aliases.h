// Protects a batch from stages that write into their arguments.
#pragma once

#include <vector>

#include "penstock/runtime/batch.h"

namespace penstock::internal {

// Replaces the tensors of the parts, which are views of those of the batch, by copy-on-write aliases: a stage may write
// into them, and neither the caller's batch nor the autograd graph of another microbatch changes. A replicated value
// stays one tensor for all parts.
void alias_chunks(std::vector<Batch>& parts, const Batch& batch);

}  // namespace penstock::internal
