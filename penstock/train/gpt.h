// A GPT on bytes, as examples/export_gpt.py has it in Python, with the same names: what `penstock train` trains when it
// is given no model. It is a row of layers, and a stage is some of them; what a layer draws at random, its first weights
// and its dropout, is its own, so it does not matter where the row is cut.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "penstock/stage/module.h"

namespace penstock::internal {

struct GptOptions {
  int layers = 4;
  int width = 64;
  int heads = 4;
  // Of a text, at most.
  int length = 64;
  double dropout = 0;
  // Products in bfloat16; parameters stay float32.
  bool bfloat16 = false;

  friend bool operator==(const GptOptions&, const GptOptions&) = default;
};

// Bytes: what a token can be.
constexpr int kVocabulary = 256;

class Gpt {
 public:
  // `seed` is that of the first weights. Throws std::invalid_argument for sizes that do not fit.
  Gpt(const GptOptions& options, std::uint64_t seed);

  const GptOptions& options() const { return options_; }
  // Blocks, with the embedding before and the head behind them.
  int layers() const { return options_.layers + 2; }
  // How the layers are shared out: for each stage its first, and one behind the last at the end. Stages take about the
  // same time. Throws std::invalid_argument for more stages than layers.
  std::vector<int> cut(int stages) const;

  // The layers from `first` to before `last`, with new parameters: ids [rows, length] go into the first of all, logits
  // [rows, length, kVocabulary] come out of the last. `training` says whether there is dropout.
  StageModule stage(int first, int last, std::shared_ptr<const bool> training) const;
  // Of all parameters, in order.
  std::vector<std::string> parameter_names() const;

 private:
  GptOptions options_;
  std::uint64_t seed_;
};

}  // namespace penstock::internal
