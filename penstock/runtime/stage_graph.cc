#include "penstock/runtime/stage_graph.h"

#include <algorithm>
#include <cstddef>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "penstock/base/text.h"

namespace penstock::internal {
namespace {

void require_same_order(const StageGraph& graph, std::span<const int> edges, const std::vector<Wiring::Link>& links,
                        int stage) {
  const auto is_same = [&](int edge, const Wiring::Link& link) {
    return graph.edges()[static_cast<std::size_t>(edge)] == Edge{.from = link.from, .to = link.to};
  };
  if (std::ranges::equal(edges, links, is_same)) return;
  throw std::logic_error(concat("stage ", stage, ": the edges of the stage graph are not the links of the wiring."));
}

}  // namespace

StageGraph graph_of(const Wiring& wiring, const SharedParameters& shared) {
  StageGraph graph(wiring.stages());
  for (const Wiring::Link& link : wiring.links()) graph.add_edge(link.from, link.to);
  for (const std::vector<SharedParameter>& places : shared) {
    std::vector<int> stages;
    for (const SharedParameter& place : places) stages.push_back(place.stage);
    graph.share(std::move(stages));
  }
  for (int stage = 0; stage < wiring.stages(); ++stage) {
    require_same_order(graph, graph.in_edges(stage), wiring.links_to(stage), stage);
    require_same_order(graph, graph.out_edges(stage), wiring.links_from(stage), stage);
  }
  return graph;
}

}  // namespace penstock::internal
