// A byte-level GPT, which `penstock train` trains by default. Its layers and names are those of examples/export_gpt.py.
// A stage is a range of layers. Each layer draws its initial weights and its dropout from its own random numbers, so
// results do not depend on where the model is cut.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "penstock/stage/module.h"

namespace penstock::internal {

struct GptOptions {
  // Number of transformer blocks.
  int layers = 4;
  int width = 64;
  int heads = 4;
  // Maximum length of a text in bytes.
  int length = 64;
  double dropout = 0;
  // Dtype of autocast, bfloat16 or float16, in which matrix products run; parameters remain float32.
  std::optional<at::ScalarType> autocast = std::nullopt;
  // Blocks that save their inputs only, and are computed again in the backward: names of blocks().
  std::vector<std::string> recomputed = {};

  // Returns the names of all blocks: "blocks.0", "blocks.1", …
  std::vector<std::string> blocks() const;

  friend bool operator==(const GptOptions&, const GptOptions&) = default;
};

// Number of tokens: one for each byte.
constexpr int kVocabulary = 256;

class Gpt {
 public:
  // `seed` determines the initial weights. Throws std::invalid_argument for options that are not valid.
  Gpt(const GptOptions& options, std::uint64_t seed);

  const GptOptions& options() const { return options_; }
  // Number of layers: the embedding, the blocks and the head.
  int layers() const { return options_.layers + 2; }
  // Cuts the layers into stages of about equal cost. Returns the first layer of each stage, followed by layers().
  // Throws std::invalid_argument for more stages than layers.
  std::vector<int> cut(int stages) const;

  // Returns the layers [first, last) with new parameters. The first layer takes ids [rows, length], the last one
  // returns logits [rows, length, kVocabulary]. Dropout is applied while `*training` is true. Initial values are drawn on
  // the CPU and copied to the device, so they are the same on all devices. On the meta device the parameters have names
  // and shapes, and no memory.
  StageModule stage(int first, int last, std::shared_ptr<const bool> training, at::Device device = at::kCPU) const;
  // Returns the names of all parameters in the order of layers.
  std::vector<std::string> parameter_names() const;

 private:
  GptOptions options_;
  std::uint64_t seed_;
};

}  // namespace penstock::internal
