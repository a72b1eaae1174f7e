// Compares the results of a pipeline with those of one process.
//
// A gradient that is zero up to rounding, such as that of a bias before a softmax, is noise, and another order of
// summation gives other noise. A difference is therefore measured relative to the scale of the computation: the
// tensor's largest element, the largest contribution of a microbatch to it, or, for a tensor that is no larger than the
// rounding error of its group (all outputs, or all gradients), the largest element of that group.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "penstock/program/inputs.h"

namespace penstock::internal::cli {

// Difference of one tensor between the pipeline and one process.
struct Difference {
  std::string name;
  // Largest absolute difference of two elements.
  double absolute = 0;
  // The same, relative to the tensor's own scale and to its group's.
  double of_own = 0;
  double of_group = 0;
  bool is_identical = true;
  bool is_tolerable = true;
};

struct Comparison {
  std::vector<Difference> differences;

  bool is_identical() const;
  bool is_tolerable() const;
  // Writes a line about the group, whose name is in the plural: "gradients".
  void write(std::ostream& out, const std::string& group) const;
};

struct ComparisonOptions {
  // Prefix of the names of the tensors to compare, which form a group.
  std::string prefix = {};
  // Largest allowed difference, relative to the scale. The default is eight times the machine epsilon of the dtype.
  std::optional<double> tolerance = std::nullopt;
  // Largest absolute element of a microbatch's contribution, by tensor name without the prefix.
  std::map<std::string, double> contributions = {};
};

// Throws ProgramError for a tensor that only one of the two computed.
Comparison compare(const TensorsByName& expected, const TensorsByName& found, const ComparisonOptions& options);

}  // namespace penstock::internal::cli
