#include "penstock/program/interpreter/checks/checks.h"

#include <ATen/Functions.h>

#include "penstock/base/text.h"
#include "penstock/program/error.h"

namespace penstock::internal {

void require(bool condition, const std::string& message) {
  if (!condition) throw ProgramError(message);
}

void require_range(const at::Tensor& tensor, std::int64_t least, std::int64_t most, const std::string& name) {
  if (!tensor.device().is_cpu() || tensor.numel() == 0) return;
  const auto [smallest, largest] = at::aminmax(tensor.to(at::kLong));
  require(smallest.item<std::int64_t>() >= least && largest.item<std::int64_t>() <= most,
          concat(name, " should be in [", least, ", ", most, "]."));
}

void require_nondecreasing(const at::Tensor& tensor, const std::string& name) {
  if (!tensor.device().is_cpu() || tensor.numel() < 2) return;
  require(at::diff(tensor).ge(0).all().item<bool>(), name + " should not decrease.");
}

bool has_tensor(const c10::IValue& argument) {
  return argument.isTensor() && argument.toTensor().defined();
}

bool is_index(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kLong || tensor.scalar_type() == at::kInt;
}

}  // namespace penstock::internal
