#include "penstock/torch_names.h"

#include <utility>

#include "penstock/base/text.h"
#include "penstock/schedule/error.h"
#include "penstock/schedule/generators.h"

namespace penstock {

using internal::concat;

Pipeline ScheduleClass::operator()(StagedModel model, int n_microbatches, PipelineOptions options, int ranks) const {
  const Generator& generator = find_generator(name_);
  const int stages = model.wiring().stages();
  if (ranks == 0) ranks = stages / generator.default_stages_per_rank();
  if (ranks < 1 || stages % ranks != 0) {
    throw ScheduleError(concat(generator.name, ": ", stages, " stages cannot be divided evenly among ", ranks,
                               " ranks.\n  Hint: make the number of stages a multiple of the number of ranks."));
  }
  const Schedule schedule =
      generate(generator.name, {.ranks = ranks, .stages_per_rank = stages / ranks, .microbatches = n_microbatches});
  return {std::move(model), schedule, std::move(options)};
}

ScheduleClass get_schedule_class(std::string_view name) {
  return ScheduleClass(find_generator(name).name);
}

ScheduleGPipe::ScheduleGPipe(StagedModel model, int n_microbatches, PipelineOptions options)
    : Pipeline(ScheduleClass("GPipe")(std::move(model), n_microbatches, std::move(options))) {}
Schedule1F1B::Schedule1F1B(StagedModel model, int n_microbatches, PipelineOptions options)
    : Pipeline(ScheduleClass("1F1B")(std::move(model), n_microbatches, std::move(options))) {}
ScheduleLoopedBFS::ScheduleLoopedBFS(StagedModel model, int n_microbatches, PipelineOptions options, int ranks)
    : Pipeline(ScheduleClass("LoopedBFS")(std::move(model), n_microbatches, std::move(options), ranks)) {}
ScheduleInterleaved1F1B::ScheduleInterleaved1F1B(StagedModel model, int n_microbatches, PipelineOptions options,
                                                 int ranks)
    : Pipeline(ScheduleClass("Interleaved1F1B")(std::move(model), n_microbatches, std::move(options), ranks)) {}
ScheduleInterleavedZeroBubble::ScheduleInterleavedZeroBubble(StagedModel model, int n_microbatches,
                                                             PipelineOptions options, int ranks)
    : Pipeline(ScheduleClass("InterleavedZeroBubble")(std::move(model), n_microbatches, std::move(options), ranks)) {}
ScheduleZBVZeroBubble::ScheduleZBVZeroBubble(StagedModel model, int n_microbatches, PipelineOptions options)
    : Pipeline(ScheduleClass("ZBVZeroBubble")(std::move(model), n_microbatches, std::move(options))) {}
ScheduleDualPipeV::ScheduleDualPipeV(StagedModel model, int n_microbatches, PipelineOptions options)
    : Pipeline(ScheduleClass("DualPipeV")(std::move(model), n_microbatches, std::move(options))) {}

}  // namespace penstock
