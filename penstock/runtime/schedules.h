// Pipelines by the names that torch.distributed.pipelining gives to their schedules.
//
//   Schedule1F1B pipeline(std::move(stages), /*n_microbatches=*/8, {.loss = mse});
//   Pipeline same = get_schedule_class("1f1b")(std::move(stages), 8, {.loss = mse}, /*ranks=*/4);
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "penstock/runtime/pipeline.h"

namespace penstock {

// Makes a pipeline of all stages. With `ranks` 0 there are as many as the schedule has them by itself: one for each stage,
// or for two of them. Throws ScheduleError when the stages cannot be dealt out evenly.
class ScheduleClass {
 public:
  explicit ScheduleClass(std::string_view name) : name_(name) {}

  const std::string& name() const { return name_; }
  Pipeline operator()(std::vector<PipelineStage> stages, int n_microbatches, PipelineOptions options = {},
                      int ranks = 0) const;

 private:
  std::string name_;
};

// By name, without regard to case. Throws ScheduleError, with the nearest name.
ScheduleClass get_schedule_class(std::string_view name);

struct ScheduleGPipe : Pipeline {
  ScheduleGPipe(std::vector<PipelineStage> stages, int n_microbatches, PipelineOptions options = {});
};
struct Schedule1F1B : Pipeline {
  Schedule1F1B(std::vector<PipelineStage> stages, int n_microbatches, PipelineOptions options = {});
};
struct ScheduleLoopedBFS : Pipeline {
  ScheduleLoopedBFS(std::vector<PipelineStage> stages, int n_microbatches, PipelineOptions options = {}, int ranks = 0);
};
struct ScheduleInterleaved1F1B : Pipeline {
  ScheduleInterleaved1F1B(std::vector<PipelineStage> stages, int n_microbatches, PipelineOptions options = {},
                          int ranks = 0);
};
struct ScheduleInterleavedZeroBubble : Pipeline {
  ScheduleInterleavedZeroBubble(std::vector<PipelineStage> stages, int n_microbatches, PipelineOptions options = {},
                                int ranks = 0);
};
struct ScheduleZBVZeroBubble : Pipeline {
  ScheduleZBVZeroBubble(std::vector<PipelineStage> stages, int n_microbatches, PipelineOptions options = {});
};
struct ScheduleDualPipeV : Pipeline {
  ScheduleDualPipeV(std::vector<PipelineStage> stages, int n_microbatches, PipelineOptions options = {});
};

}  // namespace penstock
