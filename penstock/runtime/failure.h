// Reports of all ranks about a step that failed, and the one error message that is made of them. Every rank that
// receives the reports of the others throws the same message.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "penstock/runtime/error.h"
#include "penstock/schedule/schedule.h"

namespace penstock::internal {

// State of a rank when it learns that the step has failed.
struct RankReport {
  // Position in the rank's list of actions: see Progress.
  int position = -1;
  double seconds_there = 0;
  // Rank that it waited for, or -1.
  int waiting_for = -1;
  // Cause of the rank's failure. None if it only learned of a failure elsewhere.
  enum class Kind { None, Failed, Timeout, PeerLost } kind = Kind::None;
  std::string failure = {};
};
// Encode a report as text for the transport, and decode it. An empty text is the report of a rank that was in no step.
std::string encode_report(const RankReport& report);
RankReport decode_report(const std::string& text);

struct FailedStep {
  const Schedule* schedule = nullptr;
  // Reason to give if no rank reports a failure of its own.
  std::string reason;
  // Reports by rank, of one replica after the other; none for a rank that did not answer.
  std::vector<std::optional<RankReport>> reports;
  double timeout_seconds = 0;
};
// Returns the error of a failed step. It names the rank, its stage, action and microbatch, the cause, where the other
// ranks were, and the part of the schedule around the action.
PipelineError explain(const FailedStep& step);

}  // namespace penstock::internal
