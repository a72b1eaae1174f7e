#include "penstock/runtime/model_checks.h"

#include <cstddef>

#include "penstock/base/text.h"
#include "penstock/device/streams.h"
#include "penstock/runtime/error.h"

namespace penstock::internal {
namespace {

void require_in_order(const std::vector<PipelineStage>& stages, const Schedule& schedule, bool are_all) {
  if (are_all && static_cast<int>(stages.size()) != schedule.stages()) {
    throw PipelineError(
        concat("there are ", stages.size(), " stages, and the schedule is for ", schedule.stages(), "."));
  }
  for (std::size_t i = 0; i < stages.size(); ++i) {
    const PipelineStage& stage = stages[i];
    const bool is_in_order = are_all ? stage.stage_index() == static_cast<int>(i)
                                     : i == 0 || stages[i - 1].stage_index() < stage.stage_index();
    if (is_in_order && stage.num_stages() == schedule.stages()) continue;
    throw PipelineError(concat("element ", i, " of the list of stages is stage ", stage.stage_index(), " of ",
                               stage.num_stages(), ", and the schedule is for ", schedule.stages(),
                               " stages.\n  Hint: list the stages in ascending order of stage_index."));
  }
}

// Operators take tensors of one device.
void require_on_device(const PipelineStage& stage) {
  const at::Device device = with_index(stage.device());
  for (const auto& [name, parameter] : stage.module().parameters) {
    if (!parameter.defined() || parameter.is_meta() || parameter.device() == device) continue;
    throw PipelineError(concat("stage ", stage.stage_index(), ", parameter '", name, "' is on ",
                               parameter.device().str(), ", and the stage computes on ", device.str(),
                               ".\n  Hint: set StageOptions::device, or move the module to that device."));
  }
}

// Replicas run one schedule, so they are connected alike and share the same parameters.
void require_alike(const std::vector<StagedModel>& replicas) {
  for (std::size_t i = 1; i < replicas.size(); ++i) {
    const bool same_wiring = replicas[i].wiring() == replicas.front().wiring();
    if (same_wiring && replicas[i].shared_parameters() == replicas.front().shared_parameters()) continue;
    throw PipelineError(concat("replica ", i, " has other ", same_wiring ? "shared parameters" : "wiring",
                               " than replica 0.\n  Hint: build all replicas of a model in the same way."));
  }
}

}  // namespace

void require_models(const std::vector<StagedModel>& replicas, const Schedule& schedule, bool are_threads) {
  if (replicas.empty()) throw PipelineError("there are no replicas of a model; expected at least 1.");
  if (!are_threads && replicas.size() > 1) {
    throw PipelineError(concat("there are stages of ", replicas.size(),
                               " replicas in this process; a process rank has those of one replica."));
  }
  for (const StagedModel& model : replicas) {
    require_in_order(model.stages(), schedule, are_threads);
    for (const PipelineStage& stage : model.stages()) require_on_device(stage);
  }
  require_alike(replicas);
}

}  // namespace penstock::internal
