// The transformer of bench/runtime.py: bytes to the bytes that follow them, in two stages of two blocks each.
// bench/torch_runtime.py has the same for PyTorch.
#pragma once

#include <ATen/ATen.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "penstock/stage/module.h"

namespace penstock::internal::bench {

constexpr std::int64_t kBytes = 256;
constexpr std::int64_t kLength = 128;

namespace transformer {

constexpr std::int64_t kWide = 256;
constexpr std::int64_t kHeads = 4;

using Layer = std::function<at::Tensor(const at::Tensor&)>;
using Parameters = NamedTensors;

inline at::Tensor parameter(Parameters& parameters, at::Tensor value) {
  value.requires_grad_();
  parameters.emplace_back(std::to_string(parameters.size()), value);
  return value;
}

inline Layer embedding(Parameters& parameters) {
  const at::Tensor bytes = parameter(parameters, at::randn({kBytes, kWide}));
  const at::Tensor places = parameter(parameters, at::randn({kLength, kWide}));
  return [=](const at::Tensor& ids) { return at::embedding(bytes, ids) + places; };
}

inline Layer linear(Parameters& parameters, std::int64_t from, std::int64_t to) {
  const at::Tensor weight = parameter(parameters, at::randn({to, from}).div_(std::sqrt(static_cast<double>(from))));
  const at::Tensor bias = parameter(parameters, at::zeros({to}));
  return [=](const at::Tensor& x) { return at::linear(x, weight, bias); };
}

inline Layer norm(Parameters& parameters) {
  const at::Tensor weight = parameter(parameters, at::ones({kWide}));
  const at::Tensor bias = parameter(parameters, at::zeros({kWide}));
  return [=](const at::Tensor& x) { return at::layer_norm(x, {kWide}, weight, bias); };
}

// Attention to what came before, then a perceptron.
inline Layer block(Parameters& parameters) {
  const Layer before_attention = norm(parameters);
  const Layer qkv = linear(parameters, kWide, 3 * kWide);
  const Layer out = linear(parameters, kWide, kWide);
  const Layer before_perceptron = norm(parameters);
  const Layer up = linear(parameters, kWide, 4 * kWide);
  const Layer down = linear(parameters, 4 * kWide, kWide);
  return [=](const at::Tensor& x) {
    const auto heads = [&](const at::Tensor& part) {
      return part.view({x.size(0), x.size(1), kHeads, kWide / kHeads}).transpose(1, 2);
    };
    const std::vector<at::Tensor> parts = qkv(before_attention(x)).chunk(3, -1);
    const at::Tensor mixed =
        at::scaled_dot_product_attention(heads(parts[0]), heads(parts[1]), heads(parts[2]), /*attn_mask=*/{},
                                         /*dropout_p=*/0.0, /*is_causal=*/true);
    const at::Tensor y = x + out(mixed.transpose(1, 2).reshape(x.sizes()));
    return y + down(at::gelu(up(before_perceptron(y))));
  };
}

}  // namespace transformer

// Its first or its last half.
inline StageModule half_a_transformer(bool first) {
  StageModule module;
  std::vector<transformer::Layer> layers;
  if (first) layers.push_back(transformer::embedding(module.parameters));
  for (int i = 0; i < 2; ++i) layers.push_back(transformer::block(module.parameters));
  if (!first) layers.push_back(transformer::linear(module.parameters, transformer::kWide, kBytes));
  module.forward = [layers = std::move(layers)](const Args& args, const Kwargs& /*kwargs*/) -> c10::IValue {
    at::Tensor x = args[0].toTensor();
    for (const transformer::Layer& layer : layers) x = layer(x);
    return x;
  };
  return module;
}

}  // namespace penstock::internal::bench
