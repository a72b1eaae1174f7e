#include "penstock/cli/program/comparison.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>
#include <utility>

#include "penstock/program/error.h"

namespace penstock::internal::cli {
namespace {

bool has_rounding(const at::Tensor& tensor) {
  return tensor.is_floating_point() || tensor.is_complex();
}

at::Tensor widened(const at::Tensor& tensor) {
  return tensor.to(tensor.is_complex() ? at::kComplexDouble : at::kDouble);
}

// Returns the largest finite absolute element.
double largest(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  const at::Tensor sizes = widened(tensor).abs();
  return sizes.masked_fill(sizes.isfinite().logical_not(), 0).max().item<double>();
}

// Returns eight times the machine epsilon of the dtype, which bounds what another order of summation changes.
double rounding_of(const at::Tensor& tensor) {
  if (!has_rounding(tensor)) return 0;
  int bits = 3;
  switch (c10::toRealValueType(tensor.scalar_type())) {
    case at::kDouble: bits = 52; break;
    case at::kFloat: bits = 23; break;
    case at::kHalf: bits = 10; break;
    case at::kBFloat16: bits = 7; break;
    default: break;
  }
  return 8 * std::pow(2.0, -bits);
}

double relative_to(double scale, double absolute) {
  return scale > 0 ? absolute / scale : absolute;
}

Difference difference_of(const std::string& name, const at::Tensor& expected, const at::Tensor& found,
                         double contribution, double group, const std::optional<double>& tolerance) {
  Difference difference{.name = name};
  if (expected.sizes() != found.sizes() || expected.scalar_type() != found.scalar_type()) {
    difference.absolute = difference.of_own = difference.of_group = std::numeric_limits<double>::infinity();
    difference.is_identical = difference.is_tolerable = false;
    return difference;
  }
  at::Tensor same = expected == found;
  // NaN equals NaN here.
  if (has_rounding(expected)) same = same.logical_or(expected.isnan().logical_and(found.isnan()));
  difference.is_identical = same.all().item<bool>();
  if (difference.is_identical) return difference;
  difference.absolute = (widened(expected) - widened(found)).abs().masked_fill(same, 0).max().item<double>();
  const double own = std::max({largest(expected), largest(found), contribution});
  difference.of_own = relative_to(own, difference.absolute);
  difference.of_group = relative_to(group, difference.absolute);
  const double rounding = rounding_of(expected);
  const double allowed = tolerance.value_or(rounding);
  const double noise = std::min(allowed, rounding) * group;
  difference.is_tolerable = difference.of_own <= allowed || (own <= noise && difference.absolute <= noise);
  return difference;
}

std::string short_text(double number) {
  std::ostringstream text;
  text.precision(3);
  text << number;
  return std::move(text).str();
}

}  // namespace

bool Comparison::is_identical() const {
  return std::ranges::all_of(differences, &Difference::is_identical);
}

bool Comparison::is_tolerable() const {
  return std::ranges::all_of(differences, &Difference::is_tolerable);
}

void Comparison::write(std::ostream& out, const std::string& group) const {
  out << "  " << group << ": " << differences.size();
  if (differences.empty()) {
    out << "\n";
  } else if (is_identical()) {
    out << ", all bitwise identical\n";
  } else {
    // A difference above the tolerance counts as worse than any below it.
    const auto severity = [](const Difference& difference) {
      return std::pair(!difference.is_tolerable, difference.of_own);
    };
    const auto worst = std::ranges::max_element(differences, {}, severity);
    const auto identical = std::ranges::count_if(differences, &Difference::is_identical);
    out << ", of which " << identical << " are bitwise identical; the largest difference is "
        << short_text(worst->absolute) << " in " << worst->name << " (" << short_text(worst->of_own)
        << " relative to its own scale, " << short_text(worst->of_group) << " relative to the largest of all " << group
        << ")\n";
  }
}

Comparison compare(const TensorsByName& expected, const TensorsByName& found, const ComparisonOptions& options) {
  double group = 0;
  for (const auto& [name, tensor] : expected) {
    if (name.starts_with(options.prefix) && has_rounding(tensor)) group = std::max(group, largest(tensor));
  }
  Comparison comparison;
  for (const auto& [name, tensor] : expected) {
    if (!name.starts_with(options.prefix)) continue;
    const auto other = found.find(name);
    if (other == found.end()) throw ProgramError(name + " is missing from the results of the pipeline.");
    const auto contribution = options.contributions.find(name.substr(options.prefix.size()));
    comparison.differences.push_back(difference_of(
        name, tensor, other->second, contribution == options.contributions.end() ? 0 : contribution->second, group,
        options.tolerance));
  }
  for (const auto& [name, tensor] : found) {
    if (name.starts_with(options.prefix) && !expected.contains(name)) {
      throw ProgramError(name + " is a result of the pipeline, but not of one process.");
    }
  }
  return comparison;
}

}  // namespace penstock::internal::cli
