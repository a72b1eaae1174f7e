#include "tests/schedule/expect.h"

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <vector>

namespace penstock::internal::testing {

Random seeded(unsigned default_seed) {
  const char* const wanted = std::getenv("PENSTOCK_SEED");
  const unsigned seed = wanted == nullptr ? default_seed : static_cast<unsigned>(std::stoul(wanted));
  std::cout << "PENSTOCK_SEED=" << seed << "\n";
  return Random(seed);
}

StageGraph random_graph(Random& random, int stages) {
  StageGraph graph(stages);
  if (stages < 2) return graph;
  for (int i = between(random, 0, 3); i > 0; --i) {
    const int from = between(random, 0, stages - 2);
    graph.add_edge(from, between(random, from + 1, stages - 1));
  }
  for (int i = between(random, 0, 2); i > 0; --i) {
    const int stage = between(random, 0, stages - 2);
    graph.share({stage, between(random, stage + 1, stages - 1)});
  }
  return graph;
}

Placement random_placement(Random& random, int ranks, int stages) {
  std::vector<int> rank_of_stage;
  for (int stage = 0; stage < stages; ++stage) {
    rank_of_stage.push_back(stage < ranks ? stage : between(random, 0, ranks - 1));
  }
  std::shuffle(rank_of_stage.begin(), rank_of_stage.end(), random);
  return Placement(std::move(rank_of_stage), ranks);
}

}  // namespace penstock::internal::testing
