// Reads the weights of an export.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>

#include "penstock/program/reader/archive.h"

namespace penstock::internal {

// Returns parameters, buffers and constants by name. Names that are tied in the model share one tensor. If `records` is
// not null, it receives the records of the archive that contain the weights, as byte tensors that share storage with
// them. Throws ProgramError.
std::map<std::string, at::Tensor> read_weights(const Archive& archive,
                                               std::map<std::string, at::Tensor>* records = nullptr);

}  // namespace penstock::internal
