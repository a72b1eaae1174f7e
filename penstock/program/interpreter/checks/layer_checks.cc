// Layers of neural networks.
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

// The arguments are the input, and then weight, bias and statistics, each of which may be None.
void check_batch_norm(OperatorArguments arguments) {
  const at::Tensor& input = arguments[0].toTensor();
  require(input.dim() >= 2, "the input should have at least two dimensions.");
  for (std::size_t i = 1; i < std::min<std::size_t>(arguments.size(), 5); ++i) {
    if (!has_tensor(arguments[i])) continue;
    const at::Tensor& by_channel = arguments[i].toTensor();
    require(
        by_channel.dim() == 1 && by_channel.numel() == input.size(1),
        concat("weight, bias and statistics should have one element for each of the ", input.size(1), " channels."));
  }
}

// This overload has no running statistics.
void check_batch_norm_of_batch(OperatorArguments arguments) {
  check_batch_norm(arguments);
  require(arguments[3].toBool(), "without training there should be a running mean and variance.");
}

// Running statistics are required unless the operator has a training argument that is true.
void check_batch_norm_statistics(OperatorArguments arguments) {
  check_batch_norm(arguments);
  const bool is_training = arguments[5].isBool() && arguments[5].toBool();
  require(is_training || (has_tensor(arguments[3]) && has_tensor(arguments[4])),
          "there should be a running mean and variance.");
}

void check_embedding_bag(OperatorArguments arguments) {
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
  require(offsets.numel() > 0 || !arguments[7].toBool(), "there should be a last offset.");
  if (offsets.device().is_cpu() && offsets.numel() > 0) {
    require(offsets[0].item<std::int64_t>() == 0, "offsets should begin with 0.");
    require_nondecreasing(offsets, "offsets");
  }
}

// Each layer and direction has two matrices, two biases if it has biases, and in an LSTM possibly a projection.
void require_rnn_parameters(const c10::IValue& parameters, bool has_biases, std::int64_t layers, bool bidirectional,
                            bool is_lstm) {
  require(layers > 0 && layers <= static_cast<std::int64_t>(parameters.toListRef().size()),
          "the number of layers should be at least 1, and there should be parameters for each.");
  const auto given = static_cast<std::int64_t>(parameters.toListRef().size());
  const std::int64_t expected = layers * (bidirectional ? 2 : 1) * (has_biases ? 4 : 2);
  const std::int64_t projected = layers * (bidirectional ? 2 : 1) * (has_biases ? 5 : 3);
  require(given == expected || (is_lstm && given == projected),
          concat("found ", given, " parameters, expected ", expected, "."));
  for (const c10::IValue& parameter : parameters.toListRef()) {
    require(parameter.toTensor().dim() > 0 && parameter.toTensor().numel() > 0, "no parameter should be empty.");
  }
}

template <bool is_lstm>
void check_rnn(OperatorArguments arguments) {
  require(arguments[0].toTensor().dim() == 2 || arguments[0].toTensor().dim() == 3,
          "the input should have two or three dimensions.");
  require_rnn_parameters(arguments[2], arguments[3].toBool(), arguments[4].toInt(), arguments[7].toBool(), is_lstm);
}

// Checks the overload for a packed sequence.
template <bool is_lstm>
void check_packed_rnn(OperatorArguments arguments) {
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

void check_attention(OperatorArguments arguments) {
  const at::Tensor& query = arguments[0].toTensor();
  const at::Tensor& key = arguments[1].toTensor();
  const at::Tensor& value = arguments[2].toTensor();
  for (const at::Tensor* tensor : {&query, &key, &value}) {
    require(tensor->dim() == 4 && tensor->numel() > 0 && tensor->scalar_type() == query.scalar_type(),
            "query, key and value should have four dimensions and one type, and not be empty.");
  }
  require(query.size(0) == key.size(0) && key.sizes().slice(0, 3) == value.sizes().slice(0, 3) &&
              query.size(1) % key.size(1) == 0 && query.size(3) == key.size(3) && value.size(3) == key.size(3),
          "query, key and value should have the same batch, heads and sizes.");
}

void check_weight_norm(OperatorArguments arguments) {
  const at::Tensor& direction = arguments[0].toTensor();
  const at::Tensor& magnitude = arguments[1].toTensor();
  const std::int64_t dim = arguments[2].toInt();
  require(direction.dim() > 0 && direction.numel() > 0 && dim >= -1 && dim < direction.dim(),
          "the weight should not be empty, and have the dimension that is named.");
  require(
      magnitude.numel() == (dim == -1 ? 1 : direction.size(dim)) && magnitude.scalar_type() == direction.scalar_type(),
      "there should be a magnitude for each index of the dimension, of the weight's type.");
}

// With a class out of range, the kernel reads beyond the probabilities.
void check_ctc(OperatorArguments arguments) {
  const at::Tensor& log_probabilities = arguments[0].toTensor();
  require(log_probabilities.dim() > 0, "the probabilities should have dimensions.");
  require(is_index(arguments[1].toTensor()), "the targets should be integers.");
  require_range(arguments[1].toTensor(), 0, log_probabilities.size(-1) - 1, "targets");
}

}  // namespace

void add_layer_checks(ArgumentChecks& checks) {
  checks.insert({
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
      {"aten::_scaled_dot_product_flash_attention_for_cpu", check_attention},
      {"aten::_weight_norm", check_weight_norm},
      {"aten::_weight_norm_interface", check_weight_norm},
      {"aten::ctc_loss", check_ctc},
      {"aten::_ctc_loss", check_ctc},
  });
}

}  // namespace penstock::internal
