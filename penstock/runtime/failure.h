// What the ranks say of themselves when a step fails, and the one message that is made of it: every rank ends with the
// same, as far as they can hear one another.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "penstock/runtime/error.h"
#include "penstock/schedule/schedule.h"
#include "penstock/transport/transport.h"

namespace penstock::internal {

// Where a rank was when it learnt that the step has failed.
struct RankReport {
  // As in Progress.
  int position = -1;
  double seconds_there = 0;
  // The rank that it waited for, or -1.
  int waiting_for = -1;
  // What went wrong there, if something did.
  enum class Kind { None, Failed, WasLate, IsGone } kind = Kind::None;
  std::string failure = {};
};
std::string encode_report(const RankReport& report);
// A rank that had nothing to say was in no step.
RankReport decode_report(const std::string& text);

// How a step ended.
struct FailedStep {
  const Schedule* schedule = nullptr;
  // Of when no rank reports that something went wrong there.
  std::string what;
  // By rank, of one replica after the other; nothing of those that did not answer.
  std::vector<std::optional<RankReport>> reports;
  double timeout_seconds = 0;
};
// The error of a failed step. It names the rank, its stage, action and microbatch, what went wrong there, where the others
// were, and the schedule around it.
PipelineError explain(const FailedStep& step);

}  // namespace penstock::internal
