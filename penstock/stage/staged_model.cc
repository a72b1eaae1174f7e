#include "penstock/stage/staged_model.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>

namespace penstock {
namespace {

int num_stages_of(const std::vector<PipelineStage>& stages) {
  if (stages.empty()) throw StageError("a model has no stages; expected at least 1.");
  return stages.front().num_stages();
}

SharedParameters find_shared(const std::vector<PipelineStage>& stages, SharedParameters shared) {
  // Ordered by stage, so that every process finds the same order.
  SharedParameters by_tensor;
  std::map<const void*, std::size_t> index_of;
  for (const PipelineStage& stage : stages) {
    for (const auto& [name, parameter] : stage.module().parameters) {
      const auto [found, is_new] = index_of.try_emplace(parameter.unsafeGetTensorImpl(), by_tensor.size());
      if (is_new) by_tensor.emplace_back();
      by_tensor[found->second].push_back({stage.stage_index(), name});
    }
  }
  for (std::vector<SharedParameter>& places : by_tensor) {
    const auto overlaps = [&places](const std::vector<SharedParameter>& others) {
      return std::find_first_of(places.begin(), places.end(), others.begin(), others.end()) != places.end();
    };
    const auto first = std::find_if(shared.begin(), shared.end(), overlaps);
    if (first == shared.end()) {
      if (places.front().stage != places.back().stage) shared.push_back(std::move(places));
      continue;
    }
    for (auto other = first + 1; other != shared.end(); ++other) {
      if (overlaps(*other)) places.insert(places.end(), other->begin(), other->end());
    }
    shared.erase(std::remove_if(first + 1, shared.end(), overlaps), shared.end());
    for (const SharedParameter& place : places) {
      if (std::find(first->begin(), first->end(), place) == first->end()) first->push_back(place);
    }
  }
  return shared;
}

}  // namespace

StagedModel::StagedModel(std::vector<PipelineStage> stages)
    : stages_(std::move(stages)), wiring_(num_stages_of(stages_)), shared_(find_shared(stages_, {})) {}

StagedModel::StagedModel(std::vector<PipelineStage> stages, Wiring wiring, SharedParameters shared)
    : stages_(std::move(stages)), wiring_(std::move(wiring)), shared_(find_shared(stages_, std::move(shared))) {}

}  // namespace penstock
