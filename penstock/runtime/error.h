// What the runtime throws.
#pragma once

#include <stdexcept>

namespace penstock {

// A step that cannot begin, or that failed. The message names the rank, the stage, the action and the microbatch, what
// went wrong there, and where the other ranks were.
class PipelineError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace penstock
