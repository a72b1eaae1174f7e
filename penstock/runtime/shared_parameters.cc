#include "penstock/runtime/shared_parameters.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>

namespace penstock::internal {

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
  SharedParameters shared = named;
  for (std::vector<SharedParameter>& places : by_tensor) {
    // Those that have a place in common are one.
    const auto meets = [&places](const std::vector<SharedParameter>& others) {
      return std::find_first_of(places.begin(), places.end(), others.begin(), others.end()) != places.end();
    };
    const auto first = std::find_if(shared.begin(), shared.end(), meets);
    if (first == shared.end()) {
      if (places.front().stage != places.back().stage) shared.push_back(std::move(places));
      continue;
    }
    for (auto other = first + 1; other != shared.end(); ++other) {
      if (meets(*other)) places.insert(places.end(), other->begin(), other->end());
    }
    shared.erase(std::remove_if(first + 1, shared.end(), meets), shared.end());
    for (const SharedParameter& place : places) {
      if (std::find(first->begin(), first->end(), place) == first->end()) first->push_back(place);
    }
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

}  // namespace penstock::internal
