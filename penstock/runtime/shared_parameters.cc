#include "penstock/runtime/shared_parameters.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>

namespace penstock {

SharedParameters find_shared(const std::vector<PipelineStage>& stages, const SharedParameters& named) {
  // In the order of stages, which is the same in all processes.
  SharedParameters by_tensor;
  std::map<const void*, std::size_t> index_of;
  for (const PipelineStage& stage : stages) {
    for (const auto& [name, parameter] : stage.module().parameters) {
      const auto [found, is_new] = index_of.try_emplace(parameter.unsafeGetTensorImpl(), by_tensor.size());
      if (is_new) by_tensor.emplace_back();
      by_tensor[found->second].push_back({stage.stage_index(), name});
    }
  }
  const auto is_named = [&named](const SharedParameter& place) {
    return std::any_of(named.begin(), named.end(), [&](const std::vector<SharedParameter>& places) {
      return std::find(places.begin(), places.end(), place) != places.end();
    });
  };
  SharedParameters shared = named;
  for (std::vector<SharedParameter>& places : by_tensor) {
    if (places.front().stage != places.back().stage && !is_named(places.front())) shared.push_back(std::move(places));
  }
  return shared;
}

StageGraph graph_of(const Wiring& wiring, const SharedParameters& shared) {
  StageGraph graph(wiring.stages());
  for (const Wiring::Link& link : wiring.links()) graph.add_edge(link.from, link.to);
  for (const std::vector<SharedParameter>& places : shared) {
    std::vector<int> stages;
    for (const SharedParameter& place : places) stages.push_back(place.stage);
    graph.share(std::move(stages));
  }
  return graph;
}

}  // namespace penstock
