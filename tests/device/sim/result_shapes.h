// Shapes of an operator's results, which have to be known before the operator runs on its stream.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace penstock::sim {

struct TensorShape {
  bool defined = false;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
  at::ScalarType dtype = at::kFloat;
};

struct ResultShapes {
  // One shape for each result that is a tensor, several for a list of tensors, none for results that are arguments.
  std::vector<std::vector<TensorShape>> results;
  // Shapes of the arguments `out`, in their order.
  std::vector<TensorShape> outs;
};

// Returns the shapes, or null if they cannot be found without the arguments' values. Asks the operator's Meta kernel; if
// there is none, runs the CPU's kernel on other values. Remembers what it found.
std::shared_ptr<const ResultShapes> result_shapes(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

}  // namespace penstock::sim
