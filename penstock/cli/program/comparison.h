// Compares what a pipeline computed with what one process computed, and judges the differences.
//
// A gradient that is zero but for rounding, such as that of a bias in front of a softmax, has no digits of its own to agree
// in: sums in another order give other noise. So a difference is judged against the scale of the computation: the tensor's
// own largest element, the largest contribution of a microbatch to it, and, for a tensor that is no larger than the rounding
// of its group (all outputs, or all gradients), the largest element of that group.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "penstock/program/inputs.h"

namespace penstock::cli {

// How one tensor differs between the two.
struct Difference {
  std::string name;
  // Largest absolute difference of two elements.
  double absolute = 0;
  // The same as a part of the tensor's own scale, and of its group's.
  double of_own = 0;
  double of_group = 0;
  bool is_identical = true;
  bool is_tolerable = true;
};

struct Comparison {
  std::vector<Difference> differences;

  bool is_identical() const;
  bool is_tolerable() const;
  // Writes a line. `what` names the group in the plural: "gradients".
  void write(std::ostream& out, const std::string& what) const;
};

struct ComparisonOptions {
  // Compares the tensors whose names begin with this; they are a group.
  std::string prefix = {};
  // Largest difference allowed, as a part of the scale. By default, eight times the spacing of the dtype's numbers at 1.
  std::optional<double> tolerance = std::nullopt;
  // Largest absolute element that a microbatch contributed, by the tensors' names without the prefix.
  std::map<std::string, double> contributions = {};
};

// Throws ProgramError for a tensor that only one of the two has.
Comparison compare(const TensorsByName& expected, const TensorsByName& found, const ComparisonOptions& options);

}  // namespace penstock::cli
