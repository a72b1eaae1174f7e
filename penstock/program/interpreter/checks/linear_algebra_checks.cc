// Linear algebra and Fourier transforms.
#include <ATen/Functions.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "penstock/base/text.h"
#include "penstock/program/interpreter/checks/checks.h"

namespace penstock::internal {
namespace {

// The offsets are the ends of the groups of rows or columns.
void check_grouped_mm(OperatorArguments arguments) {
  if (!has_tensor(arguments[2])) return;
  const at::Tensor& offsets = arguments[2].toTensor();
  std::int64_t most = 0;
  for (const std::size_t matrix : {0U, 1U}) {
    for (const std::int64_t size : arguments[matrix].toTensor().sizes()) most = std::max(most, size);
  }
  require(offsets.dim() == 1 && is_index(offsets), "the offsets should be a row of integers.");
  require_range(offsets, 0, most, "the offsets of groups");
  require_nondecreasing(offsets, "the offsets of groups");
}

// MKL terminates the process for matrices that are not finite.
void check_finite(OperatorArguments arguments) {
  const at::Tensor& matrix = arguments[0].toTensor();
  if (!matrix.is_cpu()) return;
  require(at::isfinite(matrix).all().item<bool>(), "the matrix should have no infinities or NaN.");
}

// The arguments are an LU factorisation and its pivots.
void check_pivots(OperatorArguments arguments) {
  const at::Tensor& factors = arguments[0].toTensor();
  const at::Tensor& pivots = arguments[1].toTensor();
  require(factors.dim() >= 2 && pivots.dim() == factors.dim() - 1 && pivots.scalar_type() == at::kInt &&
              pivots.sizes().slice(0, pivots.dim() - 1) == factors.sizes().slice(0, factors.dim() - 2) &&
              pivots.size(-1) == std::min(factors.size(-1), factors.size(-2)),
          "there should be a pivot, an int32, for each row or column of each matrix.");
  require_range(pivots, 1, factors.size(-2), "pivots");
}

void check_lu_solve(OperatorArguments arguments) {
  check_pivots(arguments.subspan(1));
}

void check_signed_pivots(OperatorArguments arguments) {
  const at::Tensor& factors = arguments[0].toTensor();
  const at::Tensor& pivots = arguments[1].toTensor();
  require(factors.dim() >= 2 && factors.size(-1) == factors.size(-2) && pivots.dim() == factors.dim() - 1 &&
              pivots.size(-1) == factors.size(-1) && pivots.scalar_type() == at::kInt,
          "there should be a pivot, an int32, for each row of each matrix.");
  require_range(pivots.abs(), 1, factors.size(-1), "pivots");
}

void check_fft(OperatorArguments arguments) {
  const at::Tensor& input = arguments[0].toTensor();
  const at::ScalarType type = c10::toRealValueType(input.scalar_type());
  require(input.numel() > 0 && (type == at::kFloat || type == at::kDouble),
          "the input should be of float32 or float64, or complex numbers of these, and not be empty.");
  const std::int64_t norm = arguments[2].toInt();
  require(norm >= 0 && norm <= 2, "the normalization should be 0, 1 or 2.");
  const std::int64_t dims = input.dim();
  std::vector<std::int64_t> along = arguments[1].toIntVector();
  for (std::int64_t& dim : along) {
    require(dim >= -dims && dim < dims, concat("there is no dimension ", dim, "."));
    if (dim < 0) dim += dims;
  }
  // The kernel does not wrap negative dimensions.
  arguments[1] = along;
  std::ranges::sort(along);
  require(std::ranges::adjacent_find(along) == along.end(), "no dimension should be named twice.");
}

void check_fft_to_real(OperatorArguments arguments) {
  check_fft(arguments);
  require(arguments[3].toInt() > 0, "the last dimension should have a size.");
}

void check_pdist(OperatorArguments arguments) {
  require(arguments[0].toTensor().dim() == 2, "the input should be a matrix.");
}

}  // namespace

void add_linear_algebra_checks(ArgumentChecks& checks) {
  checks.insert({
      {"aten::linalg_eigvals", check_finite},
      {"aten::lu_unpack", check_pivots},
      {"aten::linalg_lu_solve", check_pivots},
      {"aten::lu_solve", check_lu_solve},
      {"aten::linalg_ldl_solve", check_signed_pivots},
      {"aten::_fft_c2c", check_fft},
      {"aten::_fft_r2c", check_fft},
      {"aten::_fft_c2r", check_fft_to_real},
      {"aten::_grouped_mm", check_grouped_mm},
      {"aten::_pdist_forward", check_pdist},
  });
}

}  // namespace penstock::internal
