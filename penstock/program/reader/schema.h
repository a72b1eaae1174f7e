// The schema of an export, as libtorch has it in C++, in terms of c10. To include this takes its time to compile.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Layout.h>
#include <c10/core/MemoryFormat.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/utils/generated_serialization_types.h>

#include <cstdint>
#include <string>

#include "penstock/program/graph.h"
#include "penstock/program/reader/archive.h"

namespace penstock::internal {

namespace schema = torch::_export;

// The schema's codes are not those of c10. Each throws ProgramError for a code that there is not.
at::ScalarType dtype_of(schema::ScalarType code);
at::Layout layout_of(schema::Layout code);
at::MemoryFormat memory_format_of(schema::MemoryFormat code);
at::Device device_of(const schema::Device& device);

Dimension dimension_of(const schema::SymInt& size);
TensorType type_of(const schema::TensorMeta& meta);
// Throws ProgramError for one that is not fixed.
std::int64_t fixed_number(const schema::SymInt& number);

// The name of the archive's program. Throws ProgramError if there is none, or several.
std::string model_name(const Archive& archive);

}  // namespace penstock::internal
