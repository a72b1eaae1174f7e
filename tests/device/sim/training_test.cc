// Models train on the device with the bits of the CPU, without races and without host waits inside of a step.
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/rnn.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <memory>
#include <string>

#include "tests/device/sim/sim_test.h"

namespace penstock::sim {
namespace {

using Tensors = std::vector<at::Tensor>;

Tensors parameters_on(at::Device device, const Tensors& values) {
  Tensors parameters;
  for (const at::Tensor& value : values) {
    parameters.push_back(value.detach().to(device, /*non_blocking=*/false, /*copy=*/true).requires_grad_(true));
  }
  return parameters;
}

class Training : public SimTest {
 protected:
  void SetUp() override {
    SimTest::SetUp();
    at::manual_seed(3);
  }
};

Tensors linear_gradients(at::Device device, const Tensors& values, const at::Tensor& x, const at::Tensor& target) {
  const Tensors p = parameters_on(device, values);
  at::Tensor y = at::gelu(at::linear(x.to(device), p[0], p[1]));
  y = at::linear(at::layer_norm(y, {128}, p[2], p[3]), p[4], p[5]);
  const at::Tensor loss = at::cross_entropy_loss(y, target.to(device));
  loss.backward();
  Tensors results{loss};
  for (const at::Tensor& parameter : p) results.push_back(parameter.grad());
  return results;
}

TEST_F(Training, GivesTheGradientsOfTheCpuForLinearLayers) {
  const Tensors values{at::randn({128, 64}) / 8, at::randn({128}),          at::ones({128}),
                       at::zeros({128}),         at::randn({10, 128}) / 10, at::randn({10})};
  const at::Tensor x = at::randn({32, 64});
  const at::Tensor target = at::randint(10, {32});
  EXPECT_TRUE(same_bits(linear_gradients(d0, values, x, target), linear_gradients(at::kCPU, values, x, target)));
  const c10::StreamGuard guard(new_stream(d0));
  EXPECT_TRUE(same_bits(linear_gradients(d0, values, x, target), linear_gradients(at::kCPU, values, x, target)));
}

std::unique_ptr<torch::optim::Optimizer> optimizer_of(const std::string& name, const Tensors& parameters) {
  using namespace torch::optim;
  if (name == "sgd") return std::make_unique<SGD>(parameters, SGDOptions(0.1).momentum(0.9));
  if (name == "adam") return std::make_unique<Adam>(parameters, AdamOptions(1e-2));
  return std::make_unique<AdamW>(parameters, AdamWOptions(1e-2));
}

// A transformer layer with tied weights, trained for three steps.
Tensors train_transformer(at::Device device, const Tensors& values, const at::Tensor& tokens,
                          const std::string& optimizer_name, bool fused_attention) {
  const Tensors p = parameters_on(device, values);
  const at::Tensor input = tokens.to(device);
  const auto optimizer = optimizer_of(optimizer_name, p);
  const Counters before = device.is_cpu() ? Counters{} : counters();
  for (int step = 0; step < 3; ++step) {
    optimizer->zero_grad();
    const at::Tensor x = at::embedding(p[0], input);
    const auto heads = at::linear(x, p[1], p[2]).view({3, 7, 3, 4, 8}).permute({2, 0, 3, 1, 4}).unbind(0);
    at::Tensor mixed;
    if (fused_attention) {
      mixed = at::scaled_dot_product_attention(heads[0], heads[1], heads[2], {}, 0.0, /*is_causal=*/true);
    } else {
      const at::Tensor future = at::ones({7, 7}, x.options().dtype(at::kBool)).triu(1);
      const at::Tensor scores = heads[0].matmul(heads[1].transpose(-1, -2)) / 3.0;
      mixed = at::softmax(scores.masked_fill(future, -1e9), -1).matmul(heads[2]);
    }
    mixed = mixed.transpose(1, 2).reshape({3, 7, 32});
    const at::Tensor y = at::layer_norm(x + at::linear(mixed, p[3], p[4]), {32}, p[5], p[6]);
    const at::Tensor hidden = at::relu(at::linear(y, p[7], p[8]));
    const at::Tensor z = at::layer_norm(y + at::linear(hidden, p[9], p[10]), {32}, p[11], p[12]);
    const at::Tensor logits = at::linear(z, p[0]).view({21, 50});
    at::cross_entropy_loss(logits, input.view({21})).backward();
    if (step == 0 && !device.is_cpu()) {
      EXPECT_EQ(counters().host_waits, before.host_waits);
      EXPECT_EQ(counters().simulation_waits, before.simulation_waits);
    }
    torch::nn::utils::clip_grad_norm_(p, 1.0);
    optimizer->step();
  }
  return p;
}

class Optimizers : public Training, public testing::WithParamInterface<std::tuple<const char*, bool>> {};

TEST_P(Optimizers, TrainATransformerWithTheBitsOfTheCpu) {
  const auto random = [](at::IntArrayRef size) { return at::randn(size) / 6; };
  const Tensors values{random({50, 32}), random({96, 32}), random({96}),     random({32, 32}), random({32}),
                       at::ones({32}),   at::zeros({32}),  random({64, 32}), random({64}),     random({32, 64}),
                       random({32}),     at::ones({32}),   at::zeros({32})};
  const at::Tensor tokens = at::randint(50, {3, 7});
  const auto [optimizer, fused] = GetParam();
  EXPECT_TRUE(same_bits(train_transformer(d1, values, tokens, optimizer, fused),
                        train_transformer(at::kCPU, values, tokens, optimizer, fused)));
}

INSTANTIATE_TEST_SUITE_P(Transformer, Optimizers,
                         testing::Combine(testing::Values("sgd", "adam", "adamw"), testing::Bool()),
                         [](const auto& test) {
                           return std::string(std::get<0>(test.param)) + (std::get<1>(test.param) ? "Fused" : "Plain");
                         });

TEST_F(Training, MovesModulesWithTheirMethodTo) {
  torch::nn::Sequential module(torch::nn::Conv2d(3, 8, 3), torch::nn::BatchNorm2d(8), torch::nn::ReLU(),
                               torch::nn::Conv2d(8, 4, 3));
  const at::Tensor image = at::randn({2, 3, 12, 12});
  const auto run = [&](at::Device device) {
    module->zero_grad();
    const at::Tensor y = module->forward(image.to(device));
    y.pow(2).sum().backward();
    Tensors results{y.detach().cpu()};
    for (const at::Tensor& parameter : module->parameters()) results.push_back(parameter.grad().cpu());
    return results;
  };
  const Tensors expected = run(at::kCPU);
  module->to(d0);
  for (const at::Tensor& parameter : module->parameters()) EXPECT_EQ(parameter.device(), d0);
  EXPECT_TRUE(same_bits(run(d0), expected));
  module->to(at::kCPU);
  EXPECT_TRUE(same_bits(run(at::kCPU), expected));
}

template <class Module>
void expect_close_recurrence(Module module, at::Device device) {
  const at::Tensor x = at::randn({5, 3, 6});
  const auto run = [&](at::Device place) {
    module->zero_grad();
    const at::Tensor y = std::get<0>(module->forward(x.to(place)));
    y.pow(2).sum().backward();
    Tensors results{y.detach().cpu()};
    for (const at::Tensor& parameter : module->parameters()) results.push_back(parameter.grad().cpu());
    return results;
  };
  const Tensors expected = run(at::kCPU);
  module->to(device);
  const Tensors found = run(device);
  for (std::size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(at::allclose(found[i], expected[i], 1e-4, 1e-5)) << i;
}

TEST_F(Training, RunsRecurrentLayersNearTheCpu) {
  expect_close_recurrence(torch::nn::LSTM(torch::nn::LSTMOptions(6, 7).num_layers(2)), d0);
  expect_close_recurrence(torch::nn::GRU(torch::nn::GRUOptions(6, 7)), d0);
}

}  // namespace
}  // namespace penstock::sim
