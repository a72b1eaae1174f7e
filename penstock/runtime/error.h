// Errors of the runtime.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>

namespace penstock {

// Place in the schedule at which a computation failed.
struct FailurePlace {
  int replica = 0;
  int rank = 0;
  int stage = 0;
  int microbatch = 0;
};

// Thrown if a pipeline cannot be constructed, or a step cannot begin or has failed. The message of a failed step names
// the rank, the stage, the action and the microbatch, the cause, and where the other ranks were.
class PipelineError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  PipelineError(const std::string& what, std::optional<FailurePlace> place) : std::runtime_error(what), place_(place) {}

  // Returns the place of the computation that threw; none after a timeout or a lost connection, or if the step did not
  // begin.
  const std::optional<FailurePlace>& place() const { return place_; }

 private:
  std::optional<FailurePlace> place_;
};

}  // namespace penstock
