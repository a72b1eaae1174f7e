#include "penstock/program/interpreter/operator_checks.h"

#include <string>

#include "penstock/base/text.h"
#include "penstock/program/interpreter/checks/checks.h"

namespace penstock::internal {

ArgumentCheck find_argument_check(const c10::OperatorName& name) {
  static const ArgumentChecks all = [] {
    ArgumentChecks checks;
    add_layer_checks(checks);
    add_linear_algebra_checks(checks);
    add_memory_checks(checks);
    return checks;
  }();
  for (const std::string& key : {concat(name.name, ".", name.overload_name), name.name}) {
    if (const auto found = all.find(key); found != all.end()) return found->second;
  }
  return nullptr;
}

}  // namespace penstock::internal
