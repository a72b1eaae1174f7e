// What the runtime throws.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>

namespace penstock {

// Where in the schedule a step failed.
struct FailurePlace {
  int replica = 0;
  int rank = 0;
  int stage = 0;
  int microbatch = 0;
};

// A step that cannot begin, or that failed. The message names the rank, the stage, the action and the microbatch, what
// went wrong there, and where the other ranks were.
class PipelineError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  PipelineError(const std::string& what, std::optional<FailurePlace> place) : std::runtime_error(what), place_(place) {}

  // The computation that threw; none when a rank was late or lost, or the step did not begin.
  const std::optional<FailurePlace>& place() const { return place_; }

 private:
  std::optional<FailurePlace> place_;
};

}  // namespace penstock
