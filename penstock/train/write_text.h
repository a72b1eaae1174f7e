// Text from a model of bytes.
#pragma once

#include <cstdint>
#include <string>

#include "penstock/runtime/pipeline.h"

namespace penstock::internal {

struct WriteTextOptions {
  // How many bytes follow.
  int bytes = 200;
  // How daring the choice is: 0 takes the likeliest byte.
  double temperature = 0.8;
  std::uint64_t seed = 0;
};

// `text` and what the model, which reads `length` bytes at once, writes behind it. Longer texts are read from their end.
// On processes all call it, and all get it.
std::string write_text(Pipeline& pipeline, int length, const std::string& text, const WriteTextOptions& options);

}  // namespace penstock::internal
