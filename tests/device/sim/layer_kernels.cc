// Kernels of dropout, convolutions and fused recurrent cells, built from operators of the device or of the CPU.
#include <ATen/ATen.h>

#include <array>
#include <tuple>

#include "tests/device/sim/kernels.h"

namespace penstock::sim {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true) || p == 0) return {input.clone(), at::ones_like(input, at::kBool)};
  const at::Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                       c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
                       c10::IntArrayRef output_padding, std::int64_t groups) {
  torch::jit::Stack stack{input, weight, bias, stride, padding, dilation, transposed, output_padding, groups};
  run_on_stream("aten::convolution", "", stack);
  return stack[0].toTensor();
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(const at::Tensor& grad, const at::Tensor& input,
                                                                    const at::Tensor& weight, c10::IntArrayRef stride,
                                                                    c10::IntArrayRef padding, c10::IntArrayRef dilation,
                                                                    bool transposed, c10::IntArrayRef output_padding,
                                                                    std::int64_t groups, std::array<bool, 3> mask) {
  const std::array<std::int64_t, 1> bias_sizes{transposed ? weight.size(1) * groups : weight.size(0)};
  c10::List<bool> wanted;
  for (const bool element : mask) wanted.push_back(element);
  torch::jit::Stack stack{grad,           input,   weight,   c10::IntArrayRef(bias_sizes),
                          stride,         padding, dilation, transposed,
                          output_padding, groups,  wanted};
  run_on_stream("aten::convolution_backward", "", stack);
  return {stack[0].toTensor(), stack[1].toTensor(), stack[2].toTensor()};
}

at::Tensor with_biases(const at::Tensor& input_gates, const at::Tensor& hidden_gates, const OptionalTensor& input_bias,
                       const OptionalTensor& hidden_bias) {
  at::Tensor gates = input_gates + hidden_gates;
  if (input_bias && input_bias->defined()) gates = gates + *input_bias + *hidden_bias;
  return gates;
}

// The workspace has the four gates after their activations.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates,
                                                         const at::Tensor& cx, const OptionalTensor& input_bias,
                                                         const OptionalTensor& hidden_bias) {
  const auto gates = with_biases(input_gates, hidden_gates, input_bias, hidden_bias).chunk(4, 1);
  const at::Tensor in = gates[0].sigmoid();
  const at::Tensor forget = gates[1].sigmoid();
  const at::Tensor cell = gates[2].tanh();
  const at::Tensor out = gates[3].sigmoid();
  const at::Tensor cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(const OptionalTensor& grad_hy,
                                                                  const OptionalTensor& grad_cy, const at::Tensor& cx,
                                                                  const at::Tensor& cy, const at::Tensor& workspace,
                                                                  bool has_bias) {
  const auto gates = workspace.chunk(4, 1);
  const at::Tensor tanh_cy = cy.tanh();
  const at::Tensor hy = grad_hy && grad_hy->defined() ? *grad_hy : at::zeros_like(cy);
  at::Tensor grad = hy * gates[3] * (1 - tanh_cy * tanh_cy);
  if (grad_cy && grad_cy->defined()) grad = grad + *grad_cy;
  const auto through_sigmoid = [](const at::Tensor& grad_out, const at::Tensor& result) {
    return grad_out * result * (1 - result);
  };
  const at::Tensor grad_gates =
      at::cat({through_sigmoid(grad * gates[2], gates[0]), through_sigmoid(grad * cx, gates[1]),
               grad * gates[0] * (1 - gates[2] * gates[2]), through_sigmoid(hy * tanh_cy, gates[3])},
              1);
  return {grad_gates, grad * gates[1], has_bias ? grad_gates.sum(0) : at::Tensor()};
}

// The workspace has the reset and update gates, the new value, the old one, and the hidden part of the new value.
std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates,
                                            const at::Tensor& hx, const OptionalTensor& input_bias,
                                            const OptionalTensor& hidden_bias) {
  const bool has_bias = input_bias && input_bias->defined();
  const auto inputs = (has_bias ? input_gates + *input_bias : input_gates).chunk(3, 1);
  const auto hiddens = (has_bias ? hidden_gates + *hidden_bias : hidden_gates).chunk(3, 1);
  const at::Tensor reset = (inputs[0] + hiddens[0]).sigmoid();
  const at::Tensor update = (inputs[1] + hiddens[1]).sigmoid();
  const at::Tensor value = (inputs[2] + reset * hiddens[2]).tanh();
  return {value + update * (hx - value), at::cat({reset, update, value, hx, hiddens[2]}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(const at::Tensor& grad_hy,
                                                                                         const at::Tensor& workspace,
                                                                                         bool has_bias) {
  const auto saved = workspace.chunk(5, 1);
  const at::Tensor& reset = saved[0];
  const at::Tensor& update = saved[1];
  const at::Tensor& value = saved[2];
  const at::Tensor grad_update = grad_hy * (saved[3] - value) * update * (1 - update);
  const at::Tensor grad_value = grad_hy * (1 - update) * (1 - value * value);
  const at::Tensor grad_reset = grad_value * saved[4] * reset * (1 - reset);
  const at::Tensor grad_inputs = at::cat({grad_reset, grad_update, grad_value}, 1);
  const at::Tensor grad_hiddens = at::cat({grad_reset, grad_update, grad_value * reset}, 1);
  return {grad_inputs, grad_hiddens, grad_hy * update, has_bias ? grad_inputs.sum(0) : at::Tensor(),
          has_bias ? grad_hiddens.sum(0) : at::Tensor()};
}

}  // namespace

void register_layer_kernels(torch::Library& library) {
  library.impl("native_dropout", native_dropout);
  library.impl("convolution_overrideable", convolution);
  library.impl("convolution_backward_overrideable", convolution_backward);
  library.impl("_thnn_fused_lstm_cell", lstm_cell);
  library.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  library.impl("_thnn_fused_gru_cell", gru_cell);
  library.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
}

}  // namespace penstock::sim
