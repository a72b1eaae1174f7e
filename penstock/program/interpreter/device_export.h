// Exports for devices. An export has the device of its example inputs in its nodes, which is the CPU mostly.
#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "penstock/program/reader/exported_program.h"

namespace penstock::internal {

// Returns a copy of an export for another device: factory functions create their tensors there, and autocast is that of
// its type.
std::shared_ptr<const ExportedProgram> export_on(const ExportedProgram& exported, at::Device device);

}  // namespace penstock::internal
