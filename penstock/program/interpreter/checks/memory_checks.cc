// Operators that index memory by their arguments: strided views, sparse tensors, repeats, padding and pooling windows.
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

// Requires that a view of these sizes and strides lies in the memory of the tensor.
void require_in_storage(const at::Tensor& tensor, const c10::IValue& sizes, const c10::IValue& strides,
                        const c10::IValue& offset) {
  const std::vector<std::int64_t> size = sizes.toIntVector();
  const std::vector<std::int64_t> stride = strides.toIntVector();
  require(size.size() == stride.size(), "sizes and strides should be as many.");
  __extension__ using Wide = __int128;
  const Wide limit = static_cast<Wide>(tensor.storage().nbytes() / tensor.element_size());
  Wide last = offset.isNone() ? tensor.storage_offset() : offset.toInt();
  require(last >= 0, "the offset should not be negative.");
  for (std::size_t i = 0; i < size.size(); ++i) {
    require(size[i] >= 0 && stride[i] >= 0, "sizes and strides should not be negative.");
    // A view without elements fits anywhere.
    if (size[i] == 0) return;
    last += static_cast<Wide>(size[i] - 1) * stride[i];
    require(last < limit, concat("the view reaches beyond the memory of its tensor, which has room for ",
                                 static_cast<std::int64_t>(limit), " elements."));
  }
  require(last < limit, "the view reaches beyond the memory of its tensor.");
}

void check_as_strided(OperatorArguments arguments) {
  require_in_storage(arguments[0].toTensor(), arguments[1], arguments[2], arguments[3]);
}

void check_as_strided_scatter(OperatorArguments arguments) {
  require_in_storage(arguments[0].toTensor(), arguments[2], arguments[3], arguments[4]);
}

// The kernel applies the strides of the input to a contiguous copy.
void check_median(OperatorArguments arguments) {
  arguments[0] = arguments[0].toTensor().contiguous();
}

// Checks of elements would wait for a device, whose kernels check bounds themselves.
bool is_on_cpu(OperatorArguments arguments) {
  return arguments[0].toTensor().is_cpu() && arguments[1].toTensor().is_cpu();
}

void check_coo(OperatorArguments arguments) {
  if (!is_on_cpu(arguments)) return;
  at::_validate_sparse_coo_tensor_args(arguments[0].toTensor(), arguments[1].toTensor(), arguments[2].toIntVector());
}

template <at::Layout layout>
void check_compressed(OperatorArguments arguments) {
  if (!is_on_cpu(arguments)) return;
  at::_validate_sparse_compressed_tensor_args(arguments[0].toTensor(), arguments[1].toTensor(), arguments[2].toTensor(),
                                              arguments[3].toIntVector(), layout);
}

// Kernels multiply and add the sizes of windows without checks for overflow.
void check_windows(OperatorArguments arguments) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  for (const c10::IValue& argument : arguments) {
    if (!argument.isIntList()) continue;
    for (const std::int64_t size : argument.toIntVector()) {
      require(size >= -kMost && size <= kMost,
              concat("sizes, strides, paddings and dilations of windows should be at most ", kMost, "."));
    }
  }
}

// The kernel allocates the sum of the repeats, which may overflow, and then writes each element as often as its repeat
// says.
void check_repeats(const c10::IValue& argument) {
  const at::Tensor& repeats = argument.toTensor();
  require(is_index(repeats), "the repeats should be integers.");
  constexpr std::int64_t kMost = std::int64_t{1} << 40U;
  require_range(repeats, 0, kMost, "the repeats");
  if (!repeats.is_cpu()) return;
  require(repeats.numel() == 0 || repeats.to(at::kDouble).sum().item<double>() <= static_cast<double>(kMost),
          concat("the sum of the repeats should be at most ", kMost, "."));
}

void check_repeat_interleave(OperatorArguments arguments) {
  check_repeats(arguments[0]);
}

void check_repeat_interleave_of(OperatorArguments arguments) {
  check_repeats(arguments[1]);
}

// Kernels add paddings to sizes without checks for overflow.
void check_padding(OperatorArguments arguments) {
  constexpr std::int64_t kMost = std::int64_t{1} << 40U;
  for (const std::int64_t padding : arguments[1].toIntVector()) {
    require(padding >= -kMost && padding <= kMost, concat("a padding of ", padding, " is too large."));
  }
}

// With a scale that differs from the ratio of the sizes, the kernel reads beyond the input.
void check_antialias(OperatorArguments arguments) {
  const at::Tensor& input = arguments[0].toTensor();
  const std::vector<std::int64_t> output = arguments[1].toIntVector();
  require(input.dim() == 4 && output.size() == 2, "the input should be images, and the output size two numbers.");
  for (std::size_t i = 0; i < 2; ++i) {
    if (arguments[3 + i].isNone()) continue;
    const double scaled =
        static_cast<double>(input.size(static_cast<std::int64_t>(2 + i))) * arguments[3 + i].toDouble();
    require(std::abs(scaled - static_cast<double>(output[i])) <= 1, "scales should be those of the sizes.");
  }
}

// "unsafe" would skip the check of lengths.
void check_segment_reduce(OperatorArguments arguments) {
  arguments[6] = false;
}

}  // namespace

void add_memory_checks(ArgumentChecks& checks) {
  checks.insert({
      {"aten::as_strided", check_as_strided},
      {"aten::as_strided_", check_as_strided},
      {"aten::as_strided_copy", check_as_strided},
      {"aten::as_strided_scatter", check_as_strided_scatter},
      {"aten::median.dim", check_median},
      {"aten::nanmedian.dim", check_median},
      {"aten::sparse_coo_tensor.indices_size", check_coo},
      {"aten::sparse_csr_tensor.crow_col_value_size", check_compressed<at::kSparseCsr>},
      {"aten::sparse_csc_tensor.ccol_row_value_size", check_compressed<at::kSparseCsc>},
      {"aten::sparse_bsr_tensor.crow_col_value_size", check_compressed<at::kSparseBsr>},
      {"aten::sparse_bsc_tensor.ccol_row_value_size", check_compressed<at::kSparseBsc>},
      {"aten::constant_pad_nd", check_padding},
      {"aten::pad", check_padding},
      {"aten::_pad_circular", check_padding},
      {"aten::_pad_enum", check_padding},
      {"aten::reflection_pad1d", check_padding},
      {"aten::reflection_pad2d", check_padding},
      {"aten::reflection_pad3d", check_padding},
      {"aten::replication_pad1d", check_padding},
      {"aten::replication_pad2d", check_padding},
      {"aten::replication_pad3d", check_padding},
      {"aten::avg_pool1d", check_windows},
      {"aten::avg_pool2d", check_windows},
      {"aten::avg_pool3d", check_windows},
      {"aten::max_pool1d", check_windows},
      {"aten::max_pool1d_with_indices", check_windows},
      {"aten::max_pool2d", check_windows},
      {"aten::max_pool2d_with_indices", check_windows},
      {"aten::max_pool3d", check_windows},
      {"aten::max_pool3d_with_indices", check_windows},
      {"aten::repeat_interleave.Tensor", check_repeat_interleave},
      {"aten::repeat_interleave.self_Tensor", check_repeat_interleave_of},
      {"aten::segment_reduce", check_segment_reduce},
      {"aten::_upsample_bicubic2d_aa.", check_antialias},
      {"aten::_upsample_bilinear2d_aa.", check_antialias},
  });
}

}  // namespace penstock::internal
