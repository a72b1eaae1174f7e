// Pipelines under the class names of torch.distributed.pipelining. Each constructor generates the schedule of that name
// and passes it to Pipeline; a Schedule of Penstock is data (penstock/schedule/schedule.h).
//
//   Schedule1F1B pipeline(std::move(stages), /*n_microbatches=*/8, {.loss = mse});
//
// is the same as
//
//   Pipeline pipeline(std::move(stages), generate("1F1B", {.ranks = 4, .microbatches = 8}), {.loss = mse});
#pragma once

#include <string>
#include <string_view>

#include "penstock/runtime/pipeline.h"

namespace penstock {

// Constructs pipelines with the schedule of one name.
class ScheduleClass {
 public:
  explicit ScheduleClass(std::string_view name) : name_(name) {}

  const std::string& name() const { return name_; }
  // Returns a pipeline that runs the model's stages on `ranks` ranks. For 0 ranks, each rank gets the schedule's
  // default number of stages: one or two. Throws ScheduleError if the stages cannot be divided evenly among the ranks,
  // and what the constructor of Pipeline throws.
  Pipeline operator()(StagedModel model, int n_microbatches, PipelineOptions options = {}, int ranks = 0) const;

 private:
  std::string name_;
};

// Returns the class of a schedule's name, ignoring case. Throws ScheduleError, with the nearest name as a hint.
ScheduleClass get_schedule_class(std::string_view name);

struct ScheduleGPipe : Pipeline {
  ScheduleGPipe(StagedModel model, int n_microbatches, PipelineOptions options = {});
};
struct Schedule1F1B : Pipeline {
  Schedule1F1B(StagedModel model, int n_microbatches, PipelineOptions options = {});
};
struct ScheduleLoopedBFS : Pipeline {
  ScheduleLoopedBFS(StagedModel model, int n_microbatches, PipelineOptions options = {}, int ranks = 0);
};
struct ScheduleInterleaved1F1B : Pipeline {
  ScheduleInterleaved1F1B(StagedModel model, int n_microbatches, PipelineOptions options = {}, int ranks = 0);
};
struct ScheduleInterleavedZeroBubble : Pipeline {
  ScheduleInterleavedZeroBubble(StagedModel model, int n_microbatches, PipelineOptions options = {}, int ranks = 0);
};
struct ScheduleZBVZeroBubble : Pipeline {
  ScheduleZBVZeroBubble(StagedModel model, int n_microbatches, PipelineOptions options = {});
};
struct ScheduleDualPipeV : Pipeline {
  ScheduleDualPipeV(StagedModel model, int n_microbatches, PipelineOptions options = {});
};

}  // namespace penstock
