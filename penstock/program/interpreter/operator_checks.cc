#include "penstock/program/interpreter/operator_checks.h"

#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/program/error.h"

namespace penstock::internal {
namespace {

using Arguments = std::span<c10::IValue>;

void require(bool holds, const std::string& what) {
  if (!holds) throw ProgramError(what);
}

bool has_tensor(const c10::IValue& argument) {
  return argument.isTensor() && argument.toTensor().defined();
}

// Requires that all elements of an integer tensor lie in [least, most]. Elements on a device are left to its kernels, which
// check bounds themselves.
void require_range(const at::Tensor& tensor, std::int64_t least, std::int64_t most, const std::string& what) {
  if (!tensor.device().is_cpu() || tensor.numel() == 0) return;
  const auto [smallest, largest] = at::aminmax(tensor.to(at::kLong));
  require(smallest.item<std::int64_t>() >= least && largest.item<std::int64_t>() <= most,
          what + " should lie in [" + std::to_string(least) + ", " + std::to_string(most) + "].");
}

void require_rising(const at::Tensor& tensor, const std::string& what) {
  if (!tensor.device().is_cpu() || tensor.numel() < 2) return;
  require(at::diff(tensor).ge(0).all().item<bool>(), what + " should not fall.");
}

bool is_index(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kLong || tensor.scalar_type() == at::kInt;
}

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
    // Of no elements, none lies outside.
    if (size[i] == 0) return;
    last += static_cast<Wide>(size[i] - 1) * stride[i];
    require(last < limit, "the view reaches beyond the memory of its tensor, which has room for " +
                              std::to_string(static_cast<std::int64_t>(limit)) + " elements.");
  }
  require(last < limit, "the view reaches beyond the memory of its tensor.");
}

void check_as_strided(Arguments arguments) {
  require_in_storage(arguments[0].toTensor(), arguments[1], arguments[2], arguments[3]);
}

void check_as_strided_scatter(Arguments arguments) {
  require_in_storage(arguments[0].toTensor(), arguments[2], arguments[3], arguments[4]);
}

// Takes strides of the input for those of a copy.
void check_median(Arguments arguments) {
  arguments[0] = arguments[0].toTensor().contiguous();
}

// The groups of rows or columns end at the offsets.
void check_grouped_mm(Arguments arguments) {
  if (!has_tensor(arguments[2])) return;
  const at::Tensor& offsets = arguments[2].toTensor();
  std::int64_t most = 0;
  for (const std::size_t matrix : {0U, 1U}) {
    for (const std::int64_t size : arguments[matrix].toTensor().sizes()) most = std::max(most, size);
  }
  require(offsets.dim() == 1 && is_index(offsets), "the offsets should be a row of integers.");
  require_range(offsets, 0, most, "the offsets of groups");
  require_rising(offsets, "the offsets of groups");
}

// MKL ends the process.
void check_finite(Arguments arguments) {
  const at::Tensor& matrix = arguments[0].toTensor();
  require(at::isfinite(matrix).all().item<bool>(), "the matrix should have no infinities or NaN.");
}

void check_coo(Arguments arguments) {
  at::_validate_sparse_coo_tensor_args(arguments[0].toTensor(), arguments[1].toTensor(), arguments[2].toIntVector());
}

template <at::Layout layout>
void check_compressed(Arguments arguments) {
  at::_validate_sparse_compressed_tensor_args(arguments[0].toTensor(), arguments[1].toTensor(), arguments[2].toTensor(),
                                              arguments[3].toIntVector(), layout);
}

// Input, and then weight, bias and statistics where they are given.
void check_batch_norm(Arguments arguments) {
  const at::Tensor& input = arguments[0].toTensor();
  require(input.dim() >= 2, "the input should have at least two dimensions.");
  for (std::size_t i = 1; i < std::min<std::size_t>(arguments.size(), 5); ++i) {
    if (!has_tensor(arguments[i])) continue;
    const at::Tensor& by_channel = arguments[i].toTensor();
    require(by_channel.dim() == 1 && by_channel.numel() == input.size(1),
            "weight, bias and statistics should have one element for each of the " + std::to_string(input.size(1)) +
                " channels.");
  }
}

// There are no statistics but those of the batch.
void check_batch_norm_of_batch(Arguments arguments) {
  check_batch_norm(arguments);
  require(arguments[3].toBool(), "without training there should be a running mean and variance.");
}

// Without training, or without being asked, statistics have to be there.
void check_batch_norm_statistics(Arguments arguments) {
  check_batch_norm(arguments);
  const bool trains = arguments[5].isBool() && arguments[5].toBool();
  require(trains || (has_tensor(arguments[3]) && has_tensor(arguments[4])),
          "there should be a running mean and variance.");
}

void check_embedding_bag(Arguments arguments) {
  const at::Tensor& weight = arguments[0].toTensor();
  const at::Tensor& indices = arguments[1].toTensor();
  const at::Tensor& offsets = arguments[2].toTensor();
  require(weight.dim() == 2, "the weight should be a matrix.");
  require(indices.dim() == 1 && offsets.dim() == 1 && is_index(indices) && is_index(offsets),
          "indices and offsets should be vectors of integers.");
  if (has_tensor(arguments[6])) {
    const at::Tensor& weights = arguments[6].toTensor();
    require(weights.sizes() == indices.sizes() && weights.scalar_type() == weight.scalar_type(),
            "the weights of samples should be as many as indices, and of the type of the weight.");
  }
  require_range(indices, 0, weight.size(0) - 1, "indices");
  require_range(offsets, 0, indices.numel(), "offsets");
  if (offsets.device().is_cpu() && offsets.numel() > 0) {
    require(offsets[0].item<std::int64_t>() == 0, "offsets should begin with 0.");
    require_rising(offsets, "offsets");
  } else {
    require(!arguments[7].toBool(), "there should be a last offset.");
  }
}

// Parameters of each layer and direction: two matrices, two biases where they are wanted, and a projection of an LSTM's.
void require_rnn_parameters(const c10::IValue& parameters, bool has_biases, std::int64_t layers, bool bidirectional,
                            bool is_lstm) {
  require(layers > 0 && layers <= static_cast<std::int64_t>(parameters.toListRef().size()),
          "the number of layers should be at least 1, and there should be parameters for each.");
  const auto given = static_cast<std::int64_t>(parameters.toListRef().size());
  const std::int64_t expected = layers * (bidirectional ? 2 : 1) * (has_biases ? 4 : 2);
  const std::int64_t projected = layers * (bidirectional ? 2 : 1) * (has_biases ? 5 : 3);
  require(given == expected || (is_lstm && given == projected),
          "there should be " + std::to_string(expected) + " parameters, and there are " + std::to_string(given) + ".");
  for (const c10::IValue& parameter : parameters.toListRef()) {
    require(parameter.toTensor().dim() > 0 && parameter.toTensor().numel() > 0, "no parameter should be empty.");
  }
}

template <bool is_lstm>
void check_rnn(Arguments arguments) {
  require(arguments[0].toTensor().dim() == 2 || arguments[0].toTensor().dim() == 3,
          "the input should have two or three dimensions.");
  require_rnn_parameters(arguments[2], arguments[3].toBool(), arguments[4].toInt(), arguments[7].toBool(), is_lstm);
}

// The same of a packed sequence.
template <bool is_lstm>
void check_packed_rnn(Arguments arguments) {
  const at::Tensor& data = arguments[0].toTensor();
  const at::Tensor& rows = arguments[1].toTensor();
  require(data.dim() == 2, "a packed sequence should have two dimensions.");
  require(rows.dim() == 1 && rows.scalar_type() == at::kLong && rows.device().is_cpu() && rows.numel() > 0,
          "the batch sizes should be a vector of integers.");
  require_range(rows, 1, data.size(0), "batch sizes");
  require(at::diff(rows).le(0).all().item<bool>() && rows.sum().item<std::int64_t>() == data.size(0),
          "the batch sizes should not grow, and add up to the rows of the data.");
  require_rnn_parameters(arguments[3], arguments[4].toBool(), arguments[5].toInt(), arguments[8].toBool(), is_lstm);
}

// A factorisation and the rows that were swapped.
void check_pivots(Arguments arguments) {
  const at::Tensor& factors = arguments[0].toTensor();
  const at::Tensor& pivots = arguments[1].toTensor();
  require(factors.dim() >= 2 && pivots.dim() == factors.dim() - 1 && pivots.scalar_type() == at::kInt &&
              pivots.sizes().slice(0, pivots.dim() - 1) == factors.sizes().slice(0, factors.dim() - 2) &&
              pivots.size(-1) == std::min(factors.size(-1), factors.size(-2)),
          "there should be a pivot, an int32, for each row or column of each matrix.");
  require_range(pivots, 1, factors.size(-2), "pivots");
}

void check_lu_solve(Arguments arguments) {
  check_pivots(arguments.subspan(1));
}

void check_signed_pivots(Arguments arguments) {
  const at::Tensor& factors = arguments[0].toTensor();
  const at::Tensor& pivots = arguments[1].toTensor();
  require(factors.dim() >= 2 && factors.size(-1) == factors.size(-2) && pivots.dim() == factors.dim() - 1 &&
              pivots.size(-1) == factors.size(-1) && pivots.scalar_type() == at::kInt,
          "there should be a pivot, an int32, for each row of each matrix.");
  require_range(pivots.abs(), 1, factors.size(-1), "pivots");
}

void check_fft(Arguments arguments) {
  const at::Tensor& input = arguments[0].toTensor();
  const at::ScalarType type = c10::toRealValueType(input.scalar_type());
  require(input.numel() > 0 && (type == at::kFloat || type == at::kDouble),
          "the input should be of float32 or float64, or complex numbers of these, and not be empty.");
  const std::int64_t way = arguments[2].toInt();
  require(way >= 0 && way <= 2, "the normalization should be 0, 1 or 2.");
  const std::int64_t dims = input.dim();
  std::vector<std::int64_t> along = arguments[1].toIntVector();
  for (std::int64_t& dim : along) {
    require(dim >= -dims && dim < dims, "there is no dimension " + std::to_string(dim) + ".");
    if (dim < 0) dim += dims;
  }
  // The kernel takes dimensions for indices.
  arguments[1] = along;
  std::ranges::sort(along);
  require(std::ranges::adjacent_find(along) == along.end(), "no dimension should be named twice.");
}

void check_fft_to_real(Arguments arguments) {
  check_fft(arguments);
  require(arguments[3].toInt() > 0, "the last dimension should have a size.");
}

// Sizes of windows, which kernels multiply and add without a look at overflow.
void check_windows(Arguments arguments) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  for (const c10::IValue& argument : arguments) {
    if (!argument.isIntList()) continue;
    for (const std::int64_t size : argument.toIntVector()) {
      require(size >= -kMost && size <= kMost,
              "sizes, strides, paddings and dilations of windows should be at most " + std::to_string(kMost) + ".");
    }
  }
}

// The kernel allocates the sum, which may overflow, and then writes each element as often as it says.
void check_repeats(const c10::IValue& argument) {
  const at::Tensor& repeats = argument.toTensor();
  require(is_index(repeats), "the repeats should be integers.");
  constexpr std::int64_t kMost = std::int64_t{1} << 40U;
  require_range(repeats, 0, kMost, "the repeats");
  require(repeats.numel() == 0 || repeats.to(at::kDouble).sum().item<double>() <= static_cast<double>(kMost),
          "the sum of the repeats should be at most " + std::to_string(kMost) + ".");
}

void check_repeat_interleave(Arguments arguments) {
  check_repeats(arguments[0]);
}

void check_repeat_interleave_of(Arguments arguments) {
  check_repeats(arguments[1]);
}

void check_pdist(Arguments arguments) {
  require(arguments[0].toTensor().dim() == 2, "the input should be a matrix.");
}

void check_attention(Arguments arguments) {
  const at::Tensor& query = arguments[0].toTensor();
  const at::Tensor& key = arguments[1].toTensor();
  const at::Tensor& value = arguments[2].toTensor();
  for (const at::Tensor* one : {&query, &key, &value}) {
    require(one->dim() == 4 && one->numel() > 0 && one->scalar_type() == query.scalar_type(),
            "query, key and value should have four dimensions and one type, and not be empty.");
  }
  require(query.size(0) == key.size(0) && key.sizes().slice(0, 3) == value.sizes().slice(0, 3) &&
              query.size(1) % key.size(1) == 0 && query.size(3) == key.size(3) && value.size(3) == key.size(3),
          "query, key and value should have the same batch, heads and sizes.");
}

void check_weight_norm(Arguments arguments) {
  const at::Tensor& direction = arguments[0].toTensor();
  const at::Tensor& magnitude = arguments[1].toTensor();
  const std::int64_t dim = arguments[2].toInt();
  require(direction.dim() > 0 && direction.numel() > 0 && dim >= -1 && dim < direction.dim(),
          "the weight should not be empty, and have the dimension that is named.");
  require(
      magnitude.numel() == (dim == -1 ? 1 : direction.size(dim)) && magnitude.scalar_type() == direction.scalar_type(),
      "there should be a magnitude for each index of the dimension, of the weight's type.");
}

// Sizes are added to without a look at what an integer can hold.
void check_padding(Arguments arguments) {
  constexpr std::int64_t kMost = std::int64_t{1} << 40U;
  for (const std::int64_t padding : arguments[1].toIntVector()) {
    require(padding >= -kMost && padding <= kMost, "a padding of " + std::to_string(padding) + " is too large.");
  }
}

// A scale other than that of the sizes reads beyond the input.
void check_antialias(Arguments arguments) {
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

// Classes that are not there read beyond the probabilities.
void check_ctc(Arguments arguments) {
  const at::Tensor& log_probabilities = arguments[0].toTensor();
  require(log_probabilities.dim() > 0, "the probabilities should have dimensions.");
  require(is_index(arguments[1].toTensor()), "the targets should be integers.");
  require_range(arguments[1].toTensor(), 0, log_probabilities.size(-1) - 1, "targets");
}

// "unsafe" leaves out the check of lengths.
void check_segment_reduce(Arguments arguments) {
  arguments[6] = false;
}

// By name, or by name and overload; a name that ends in a dot is that of the overload without a name.
const std::map<std::string_view, ArgumentCheck>& checks() {
  static const std::map<std::string_view, ArgumentCheck> all{
      {"aten::as_strided", check_as_strided},
      {"aten::as_strided_", check_as_strided},
      {"aten::as_strided_copy", check_as_strided},
      {"aten::as_strided_scatter", check_as_strided_scatter},
      {"aten::median.dim", check_median},
      {"aten::nanmedian.dim", check_median},
      {"aten::linalg_eigvals", check_finite},
      {"aten::sparse_coo_tensor.indices_size", check_coo},
      {"aten::sparse_csr_tensor.crow_col_value_size", check_compressed<at::kSparseCsr>},
      {"aten::sparse_csc_tensor.ccol_row_value_size", check_compressed<at::kSparseCsc>},
      {"aten::sparse_bsr_tensor.crow_col_value_size", check_compressed<at::kSparseBsr>},
      {"aten::sparse_bsc_tensor.ccol_row_value_size", check_compressed<at::kSparseBsc>},
      {"aten::native_batch_norm", check_batch_norm_statistics},
      {"aten::_native_batch_norm_legit", check_batch_norm_statistics},
      {"aten::_native_batch_norm_legit.no_stats", check_batch_norm_of_batch},
      {"aten::_native_batch_norm_legit_functional", check_batch_norm_statistics},
      {"aten::_native_batch_norm_legit_no_training", check_batch_norm},
      {"aten::_batch_norm_with_update", check_batch_norm},
      {"aten::_batch_norm_with_update_functional", check_batch_norm},
      {"aten::_batch_norm_no_update", check_batch_norm_statistics},
      {"aten::embedding_bag", check_embedding_bag},
      {"aten::_embedding_bag", check_embedding_bag},
      {"aten::_embedding_bag_forward_only", check_embedding_bag},
      {"aten::lstm.input", check_rnn<true>},
      {"aten::gru.input", check_rnn<false>},
      {"aten::rnn_tanh.input", check_rnn<false>},
      {"aten::rnn_relu.input", check_rnn<false>},
      {"aten::lstm.data", check_packed_rnn<true>},
      {"aten::gru.data", check_packed_rnn<false>},
      {"aten::rnn_tanh.data", check_packed_rnn<false>},
      {"aten::rnn_relu.data", check_packed_rnn<false>},
      {"aten::lu_unpack", check_pivots},
      {"aten::linalg_lu_solve", check_pivots},
      {"aten::lu_solve", check_lu_solve},
      {"aten::linalg_ldl_solve", check_signed_pivots},
      {"aten::_fft_c2c", check_fft},
      {"aten::_fft_r2c", check_fft},
      {"aten::_fft_c2r", check_fft_to_real},
      {"aten::_grouped_mm", check_grouped_mm},
      {"aten::_pdist_forward", check_pdist},
      {"aten::_scaled_dot_product_flash_attention_for_cpu", check_attention},
      {"aten::_weight_norm", check_weight_norm},
      {"aten::_weight_norm_interface", check_weight_norm},
      {"aten::ctc_loss", check_ctc},
      {"aten::_ctc_loss", check_ctc},
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
  };
  return all;
}

}  // namespace

ArgumentCheck find_argument_check(const c10::OperatorName& name) {
  for (const std::string& key : {name.name + "." + name.overload_name, name.name}) {
    if (const auto found = checks().find(key); found != checks().end()) return found->second;
  }
  return nullptr;
}

}  // namespace penstock::internal
