// Text generation with a byte-level language model.
#pragma once

#include <cstdint>
#include <string>

#include "penstock/runtime/pipeline.h"

namespace penstock::internal {

struct GenerateTextOptions {
  // Number of bytes to generate.
  int bytes = 200;
  // Sampling temperature. 0 always takes the most likely byte.
  double temperature = 0.8;
  std::uint64_t seed = 0;
};

// Returns `prompt` and the bytes that the model generates after it. The model reads at most the last `length` bytes at
// a time. All processes call it, and all get the same text. Throws PipelineError.
std::string generate_text(Pipeline& pipeline, int length, const std::string& prompt,
                          const GenerateTextOptions& options);

}  // namespace penstock::internal
