#include "penstock/runtime/schedules.h"

#include <utility>

#include "penstock/schedule/error.h"
#include "penstock/schedule/generators.h"

namespace penstock {

Pipeline ScheduleClass::operator()(std::vector<PipelineStage> stages, int n_microbatches, PipelineOptions options,
                                   int ranks) const {
  const Generator& generator = find_generator(name_);
  const int count = static_cast<int>(stages.size());
  if (ranks == 0) ranks = count / generator.default_stages_per_rank();
  if (ranks < 1 || count % ranks != 0) {
    throw ScheduleError(std::string(generator.name) + " deals its stages out evenly, which " + std::to_string(count) +
                        " stages on " + std::to_string(ranks) + " ranks cannot be.");
  }
  const Schedule schedule =
      generate(generator.name, {.ranks = ranks, .stages_per_rank = count / ranks, .microbatches = n_microbatches});
  return {std::move(stages), schedule, std::move(options)};
}

ScheduleClass get_schedule_class(std::string_view name) {
  return ScheduleClass(find_generator(name).name);
}

ScheduleGPipe::ScheduleGPipe(std::vector<PipelineStage> stages, int n_microbatches, PipelineOptions options)
    : Pipeline(ScheduleClass("GPipe")(std::move(stages), n_microbatches, std::move(options))) {}
Schedule1F1B::Schedule1F1B(std::vector<PipelineStage> stages, int n_microbatches, PipelineOptions options)
    : Pipeline(ScheduleClass("1F1B")(std::move(stages), n_microbatches, std::move(options))) {}
ScheduleLoopedBFS::ScheduleLoopedBFS(std::vector<PipelineStage> stages, int n_microbatches, PipelineOptions options,
                                     int ranks)
    : Pipeline(ScheduleClass("LoopedBFS")(std::move(stages), n_microbatches, std::move(options), ranks)) {}
ScheduleInterleaved1F1B::ScheduleInterleaved1F1B(std::vector<PipelineStage> stages, int n_microbatches,
                                                 PipelineOptions options, int ranks)
    : Pipeline(ScheduleClass("Interleaved1F1B")(std::move(stages), n_microbatches, std::move(options), ranks)) {}
ScheduleInterleavedZeroBubble::ScheduleInterleavedZeroBubble(std::vector<PipelineStage> stages, int n_microbatches,
                                                             PipelineOptions options, int ranks)
    : Pipeline(ScheduleClass("InterleavedZeroBubble")(std::move(stages), n_microbatches, std::move(options), ranks)) {}
ScheduleZBVZeroBubble::ScheduleZBVZeroBubble(std::vector<PipelineStage> stages, int n_microbatches,
                                             PipelineOptions options)
    : Pipeline(ScheduleClass("ZBVZeroBubble")(std::move(stages), n_microbatches, std::move(options))) {}
ScheduleDualPipeV::ScheduleDualPipeV(std::vector<PipelineStage> stages, int n_microbatches, PipelineOptions options)
    : Pipeline(ScheduleClass("DualPipeV")(std::move(stages), n_microbatches, std::move(options))) {}

}  // namespace penstock
