#include "penstock/runtime/stage_graph.h"

#include <utility>
#include <vector>

namespace penstock::internal {

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
