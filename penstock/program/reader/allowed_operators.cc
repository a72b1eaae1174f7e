#include "penstock/program/reader/allowed_operators.h"

#include <algorithm>
#include <unordered_set>

#include "penstock/base/text.h"
#include "penstock/program/error.h"

namespace penstock::internal {
namespace {

std::unordered_set<std::string_view> read_allowed() {
  constexpr std::string_view kAllowed = "allowed ";
  std::unordered_set<std::string_view> names;
  for (std::string_view rest = judged_operators(); !rest.empty();) {
    const std::string_view line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(rest.size(), line.size() + 1));
    if (line.starts_with(kAllowed)) names.insert(line.substr(kAllowed.size()));
  }
  return names;
}

std::string full_name(const c10::OperatorName& name) {
  return name.overload_name.empty() ? name.name : concat(name.name, ".", name.overload_name);
}

// Returns "library::name" or "library::name.overload".
std::string normalised(std::string name) {
  constexpr std::string_view kPrefix = "torch.ops.";
  const std::string given = name;
  if (name.starts_with(kPrefix)) {
    name.erase(0, kPrefix.size());
    if (const std::size_t dot = name.find('.'); dot != std::string::npos) name.replace(dot, 1, "::");
  }
  constexpr std::string_view kDefault = ".default";
  if (name.ends_with(kDefault)) name.erase(name.size() - kDefault.size());
  const std::size_t colons = name.find("::");
  const bool is_name = colons != std::string::npos && colons > 0 && colons + 2 < name.size() &&
                       name.find_first_of(" \t\n", 0) == std::string::npos;
  if (!is_name) {
    throw ProgramError(concat(
        "'", given, "' is not the name of an operator.\n  Hint: write it as library::name, such as torchvision::nms."));
  }
  return name;
}

}  // namespace

AllowedOperators::AllowedOperators(const std::vector<std::string>& additional) {
  for (const std::string& name : additional) additional_.insert(normalised(name));
}

bool AllowedOperators::contains(const c10::OperatorName& name) const {
  static const std::unordered_set<std::string_view> by_default = read_allowed();
  const std::string full = full_name(name);
  return by_default.contains(full) || additional_.contains(full) || additional_.contains(name.name);
}

}  // namespace penstock::internal
