// Trains a small byte-level transformer on the bytes of a text, on two thread ranks, and draws the measured and the
// simulated timeline of the last step.
//
//   example_train README.md build/demo
#include <torch/nn.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "penstock/runtime/pipeline.h"
#include "penstock/schedule/draw.h"
#include "penstock/schedule/generators.h"
#include "penstock/schedule/simulate.h"
#include "penstock/stage/modules.h"

namespace {

constexpr std::int64_t kBytes = 256;
constexpr std::int64_t kWidth = 64;
constexpr std::int64_t kHeads = 4;
constexpr std::int64_t kLength = 64;
constexpr std::int64_t kRows = 32;
constexpr int kMicrobatches = 8;
constexpr int kSteps = 60;

// A transformer block: causal attention, then a perceptron.
struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    for (torch::nn::LayerNorm* norm : {&before_attention, &before_perceptron}) {
      *norm = torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth}));
    }
    register_module("before_attention", before_attention);
    register_module("before_perceptron", before_perceptron);
    register_module("qkv", qkv);
    register_module("out", out);
    register_module("up", up);
    register_module("down", down);
  }

  at::Tensor forward(const at::Tensor& x) {
    const auto heads = [&](const at::Tensor& part) {
      return part.view({x.size(0), x.size(1), kHeads, kWidth / kHeads}).transpose(1, 2);
    };
    const std::vector<at::Tensor> parts = qkv(before_attention(x)).chunk(3, -1);
    const at::Tensor mixed =
        at::scaled_dot_product_attention(heads(parts[0]), heads(parts[1]), heads(parts[2]), /*attn_mask=*/{},
                                         /*dropout_p=*/0.0, /*is_causal=*/true);
    const at::Tensor y = x + out(mixed.transpose(1, 2).reshape(x.sizes()));
    return y + down(at::dropout(at::gelu(up(before_perceptron(y))), 0.1, is_training()));
  }

  torch::nn::LayerNorm before_attention = nullptr;
  torch::nn::LayerNorm before_perceptron = nullptr;
  torch::nn::Linear qkv{kWidth, 3 * kWidth};
  torch::nn::Linear out{kWidth, kWidth};
  torch::nn::Linear up{kWidth, 4 * kWidth};
  torch::nn::Linear down{4 * kWidth, kWidth};
};
TORCH_MODULE(Block);

// Embeds bytes and their positions.
struct EmbedImpl : torch::nn::Module {
  EmbedImpl() {
    register_module("bytes", bytes);
    register_module("positions", positions);
  }
  at::Tensor forward(const at::Tensor& ids) { return bytes(ids) + positions(at::arange(ids.size(1))); }

  torch::nn::Embedding bytes{kBytes, kWidth};
  torch::nn::Embedding positions{kLength, kWidth};
};
TORCH_MODULE(Embed);

at::Tensor read_bytes(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  if (text.size() <= kLength + 1) throw std::runtime_error(path + ": the file is missing, or too short");
  const auto* const bytes = reinterpret_cast<const std::uint8_t*>(text.data());
  return at::tensor(at::ArrayRef<std::uint8_t>(bytes, text.size()), at::kLong);
}

at::Tensor cross_entropy(const c10::IValue& output, const c10::IValue& target, const penstock::Kwargs& /*kwargs*/) {
  return at::cross_entropy_loss(output.toTensor().reshape({-1, kBytes}), target.toTensor().reshape(-1));
}

void write_html(const std::filesystem::path& path, const penstock::Drawing& drawing) {
  std::ofstream page(path);
  penstock::draw_html(page, drawing);
  if (!page.flush()) throw std::runtime_error("cannot write " + path.string());
}

void train(const std::string& text_path, const std::filesystem::path& directory) {
  torch::manual_seed(1);
  std::vector<penstock::PipelineStage> stages;
  stages.emplace_back(penstock::stage_module(torch::nn::Sequential(Embed(), Block(), Block())), 0, 2);
  stages.emplace_back(
      penstock::stage_module(torch::nn::Sequential(Block(), Block(), torch::nn::Linear(kWidth, kBytes))), 1, 2);
  std::vector<at::Tensor> parameters;
  for (const penstock::PipelineStage& stage : stages) {
    for (const auto& [name, parameter] : stage.parameters()) parameters.push_back(parameter);
  }
  torch::optim::AdamW optimizer(parameters, torch::optim::AdamWOptions(3e-3));
  penstock::Pipeline pipeline(std::move(stages),
                              penstock::generate("1F1B", {.ranks = 2, .microbatches = kMicrobatches}),
                              {.loss = cross_entropy});

  const at::Tensor text = read_bytes(text_path);
  for (int step = 1; step <= kSteps; ++step) {
    const at::Tensor starts = at::randint(text.size(0) - kLength - 1, {kRows, 1});
    const at::Tensor rows = text.index({starts + at::arange(kLength + 1)});
    const penstock::StepResult result =
        pipeline.step({rows.narrow(1, 0, kLength)}, {}, rows.narrow(1, 1, kLength), {.return_outputs = false});
    optimizer.step();
    optimizer.zero_grad();
    const double loss = at::stack(result.losses).mean().item<double>();
    if (step == 1 || step % 5 == 0) {
      std::string bar;
      for (int i = 0; i < static_cast<int>(loss * 10); ++i) bar += "█";
      std::printf("step %3d   loss %.3f  %s\n", step, loss, bar.c_str());
    }
  }

  const penstock::Schedule& schedule = pipeline.recorded_schedule();
  const penstock::Timeline measured = penstock::timeline_of(schedule, pipeline.record());
  const penstock::Costs costs = penstock::costs_of(schedule, pipeline.record());
  const penstock::Timeline simulated = penstock::simulate(schedule, costs);
  std::printf("\nthe last step: %.1f ms, %.0f %% bubble; simulated with the measured costs: %.1f ms\n",
              measured.makespan, 100 * measured.bubble, simulated.makespan);
  std::filesystem::create_directories(directory);
  write_html(directory / "measured.html", {schedule, measured, costs, "1F1B, measured (ms)"});
  write_html(directory / "simulated.html", {schedule, simulated, costs, "1F1B, simulated (ms)"});
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "Usage: example_train TEXT DIRECTORY\n";
    return 2;
  }
  try {
    train(argv[1], argv[2]);
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return EXIT_FAILURE;
  }
}
