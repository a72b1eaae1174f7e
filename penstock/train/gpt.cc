#include "penstock/train/gpt.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/program/interpreter/initial_values.h"
#include "penstock/stage/checkpoint.h"
#include "penstock/tensor/autocast_scope.h"
#include "penstock/tensor/random_scope.h"

namespace penstock::internal {
namespace {

using Layer = std::function<at::Tensor(const at::Tensor&)>;

// Creates layers, and appends their parameters to a list. On the meta device the parameters have no values.
class LayerMaker {
 public:
  LayerMaker(const GptOptions& options, std::shared_ptr<const bool> training, at::Device device,
             NamedTensors& parameters)
      : options_(options), training_(std::move(training)), device_(device), parameters_(parameters) {}

  Layer make(int layer) {
    if (layer == 0) return embedding();
    if (layer <= options_.layers) return block(concat("blocks.", layer - 1, "."));
    return head();
  }

 private:
  // `initialise` sets the values of the new parameter, in place.
  template <class Initialise>
  at::Tensor parameter(const std::string& name, at::IntArrayRef sizes, const Initialise& initialise) {
    at::Tensor value = at::empty(sizes, device_.is_meta() ? device_ : at::Device(at::kCPU));
    if (!value.is_meta()) initialise(value);
    value = value.to(device_);
    value.requires_grad_();
    parameters_.emplace_back(name, value);
    return value;
  }

  // Initialises as torch.nn.Linear does. Only the embeddings differ: they are small, so that the initial predictions
  // are close to uniform.
  Layer linear(const std::string& name, int from, int to) {
    const auto draw = [range = 1 / std::sqrt(static_cast<double>(from))](at::Tensor& value) {
      value.uniform_(-range, range);
    };
    const at::Tensor weight = parameter(name + ".weight", {to, from}, draw);
    const at::Tensor bias = parameter(name + ".bias", {to}, draw);
    return [=](const at::Tensor& x) { return at::linear(x, weight, bias); };
  }

  Layer norm(const std::string& name) {
    const at::Tensor weight = parameter(name + ".weight", {options_.width}, [](at::Tensor& value) { value.fill_(1); });
    const at::Tensor bias = parameter(name + ".bias", {options_.width}, [](at::Tensor& value) { value.zero_(); });
    return [=](const at::Tensor& x) { return at::layer_norm(x, {x.size(-1)}, weight, bias); };
  }

  Layer dropout() const {
    return [rate = options_.dropout, training = training_](const at::Tensor& x) {
      return rate > 0 && *training ? at::dropout(x, rate, /*train=*/true) : x;
    };
  }

  Layer embedding() {
    const auto draw = [](at::Tensor& value) { value.normal_().mul_(0.02); };
    const at::Tensor bytes = parameter("bytes.weight", {kVocabulary, options_.width}, draw);
    const at::Tensor places = parameter("places", {options_.length, options_.width}, draw);
    return [=, drop = dropout()](const at::Tensor& ids) {
      return drop(at::embedding(bytes, ids) + places.narrow(0, 0, ids.size(1)));
    };
  }

  // A transformer block: causal attention, then a perceptron.
  Layer block(const std::string& name) {
    const int width = options_.width;
    const Layer before_attention = norm(name + "before_attention");
    const Layer qkv = linear(name + "qkv", width, 3 * width);
    const Layer out = linear(name + "out", width, width);
    const Layer before_perceptron = norm(name + "before_perceptron");
    const Layer up = linear(name + "up", width, 4 * width);
    const Layer down = linear(name + "down", 4 * width, width);
    return [=, heads = options_.heads, drop = dropout()](const at::Tensor& x) {
      const auto per_head = [&](const at::Tensor& part) {
        return part.view({x.size(0), x.size(1), heads, x.size(2) / heads}).transpose(1, 2);
      };
      const std::vector<at::Tensor> parts = qkv(before_attention(x)).chunk(3, -1);
      const at::Tensor mixed =
          at::scaled_dot_product_attention(per_head(parts[0]), per_head(parts[1]), per_head(parts[2]), /*attn_mask=*/{},
                                           /*dropout_p=*/0.0, /*is_causal=*/true);
      const at::Tensor y = x + drop(out(mixed.transpose(1, 2).reshape(x.sizes())));
      return y + drop(down(at::gelu(up(before_perceptron(y)))));
    };
  }

  Layer head() {
    const Layer before = norm("norm");
    const Layer to_bytes = linear("head", options_.width, kVocabulary);
    // In bfloat16 and float16 the loss would be imprecise.
    return [=](const at::Tensor& x) { return to_bytes(before(x)).to(at::kFloat); };
  }

  const GptOptions& options_;
  std::shared_ptr<const bool> training_;
  at::Device device_;
  NamedTensors& parameters_;
};

void require(bool valid, const std::string& problem) {
  if (!valid) throw std::invalid_argument("a GPT cannot have " + problem);
}

}  // namespace

Gpt::Gpt(const GptOptions& options, std::uint64_t seed) : options_(options), seed_(seed) {
  require(options.layers >= 0, concat(options.layers, " layers."));
  require(options.length >= 1, concat("texts of ", options.length, " bytes."));
  require(
      options.heads >= 1 && options.width >= 1 && options.width % options.heads == 0,
      concat(options.heads, " heads for a width of ", options.width, ": the width must be divisible by the heads."));
  require(options.dropout >= 0 && options.dropout < 1,
          concat("a dropout of ", std::to_string(options.dropout), ": expected at least 0 and less than 1."));
  const std::vector<std::string> blocks = options.blocks();
  for (const std::string& name : options.recomputed) {
    require(std::ranges::find(blocks, name) != blocks.end(),
            concat("a module '", name, "' that is recomputed: its modules are blocks.0 to blocks.", options.layers - 1,
                   "."));
  }
}

std::vector<std::string> GptOptions::blocks() const {
  std::vector<std::string> names;
  for (int block = 0; block < layers; ++block) names.push_back(concat("blocks.", block));
  return names;
}

std::vector<int> Gpt::cut(int stages) const {
  if (stages < 1 || stages > layers()) {
    throw std::invalid_argument(concat("a GPT of ", options_.layers, " layers cannot be cut into ", stages,
                                       " stages: with the embedding and the head there are ", layers(), " layers."));
  }
  // Cost of a layer: multiplications per token. The lookup of the embedding costs almost nothing.
  const double width = options_.width;
  const double block_cost = 12 * width * width + 2 * width * options_.length;
  std::vector<double> before(1, 0);
  for (int layer = 0; layer < layers(); ++layer) {
    const double cost = layer == 0 ? width : layer <= options_.layers ? block_cost : width * kVocabulary;
    before.push_back(before.back() + cost);
  }
  // best[k][i] is the lowest possible cost of the most expensive of k stages that contain the layers before i.
  const auto count = static_cast<std::size_t>(layers());
  std::vector best(static_cast<std::size_t>(stages) + 1, std::vector<double>(count + 1, before.back() + 1));
  std::vector from(static_cast<std::size_t>(stages) + 1, std::vector<std::size_t>(count + 1, 0));
  best[0][0] = 0;
  for (std::size_t k = 1; k < best.size(); ++k) {
    for (std::size_t end = k; end <= count; ++end) {
      for (std::size_t begin = k - 1; begin < end; ++begin) {
        const double slowest = std::max(best[k - 1][begin], before[end] - before[begin]);
        if (slowest >= best[k][end]) continue;
        best[k][end] = slowest;
        from[k][end] = begin;
      }
    }
  }
  std::vector<int> firsts(static_cast<std::size_t>(stages) + 1, layers());
  std::size_t end = count;
  for (std::size_t k = static_cast<std::size_t>(stages); k > 0; --k) {
    end = from[k][end];
    firsts[k - 1] = static_cast<int>(end);
  }
  return firsts;
}

StageModule Gpt::stage(int first, int last, std::shared_ptr<const bool> training, at::Device device) const {
  StageModule module;
  LayerMaker maker(options_, std::move(training), device, module.parameters);
  std::vector<Layer> made;
  for (int layer = first; layer < last; ++layer) {
    const RandomScope scope(seed_, kInitialStep, /*microbatch=*/0, /*place=*/layer);
    made.push_back(maker.make(layer));
  }
  std::vector<bool> recomputed;
  const std::vector<std::string> blocks = options_.blocks();
  for (int layer = first; layer < last; ++layer) {
    const bool is_block = layer > 0 && layer <= options_.layers;
    recomputed.push_back(is_block &&
                         std::ranges::find(options_.recomputed, blocks[static_cast<std::size_t>(layer - 1)]) !=
                             options_.recomputed.end());
  }
  module.forward = [first, made = std::move(made), recomputed = std::move(recomputed), dtype = options_.autocast,
                    device = device.type()](const Args& args, const Kwargs&) {
    std::optional<AutocastScope> autocast;
    if (dtype) autocast.emplace(device, *dtype);
    at::Tensor x = args.at(0).toTensor();
    for (std::size_t i = 0; i < made.size(); ++i) {
      std::optional<RandomScope> scope;
      if (RandomScope::is_open()) scope.emplace(first + static_cast<std::int64_t>(i));
      x = recomputed[i] ? checkpoint(made[i], x) : made[i](x);
    }
    return c10::IValue(x);
  };
  return module;
}

std::vector<std::string> Gpt::parameter_names() const {
  std::vector<std::string> names;
  const StageModule whole = stage(0, layers(), std::make_shared<bool>(false), at::kMeta);
  for (const auto& [name, tensor] : whole.parameters) names.push_back(name);
  return names;
}

}  // namespace penstock::internal
