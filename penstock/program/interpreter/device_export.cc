#include "penstock/program/interpreter/device_export.h"

namespace penstock::internal {
namespace {

void move(Operand& operand, at::Device device) {
  if (operand.is_constant() && operand.constant.isDevice()) operand.constant = device;
  for (Operand& element : operand.elements) move(element, device);
}

}  // namespace

std::shared_ptr<const ExportedProgram> export_on(const ExportedProgram& exported, at::Device device) {
  auto moved = std::make_shared<ExportedProgram>(exported);
  moved->graph.device_type = device.type();
  for (Region& region : moved->graph.regions) {
    if (region.autocast) region.autocast->device = device.type();
  }
  for (Node& node : moved->graph.nodes) {
    for (Operand& operand : node.operands) move(operand, device);
  }
  return moved;
}

}  // namespace penstock::internal
