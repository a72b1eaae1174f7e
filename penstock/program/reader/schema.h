// Converts libtorch's C++ types of the export schema to those of c10. This header is slow to compile.
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

// Convert the schema's enumerations, whose values differ from c10's. Throw ProgramError for an unknown value.
at::ScalarType dtype_of(schema::ScalarType code);
at::Layout layout_of(schema::Layout code);
at::MemoryFormat memory_format_of(schema::MemoryFormat code);
// Returns the CPU for the meta device: what was exported without memory runs on it once its weights have values.
at::Device device_of(const schema::Device& device);

Dimension dimension_of(const schema::SymInt& size);
TensorType type_of(const schema::TensorMeta& meta);
// Returns a static size. Throws ProgramError for a dynamic one.
std::int64_t static_size(const schema::SymInt& number);

// Returns the name of the archive's program. Throws ProgramError if there is none, or several.
std::string model_name(const Archive& archive);

}  // namespace penstock::internal
