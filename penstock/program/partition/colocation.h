// Nodes that a cut must leave in one stage, because of what they write.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "penstock/program/reader/exported.h"

namespace penstock::internal {

struct Bond {
  enum class Kind {
    // A buffer lives in one stage: the next microbatch is to see what was written to it.
    Held,
    // An input that the user gave is written to by the first stage alone, which has it.
    Given,
    // Dropout gives its input itself in evaluation. Where one of the two is written to in another stage than the other
    // is used in after that, what is used would depend on the mode.
    Doubtful
  };

  Kind kind = Kind::Held;
  // What writes, and what uses that; -1 stands for something in the first stage that is no node.
  int writer = -1;
  int user = -1;
  // What is written to, for an error.
  std::string name;
};

std::vector<Bond> bonds_of(const Exported& exported);

// Parameters, buffers and constants that the program writes to, in place or when all is done: their values in the graph.
std::set<int> written_values(const Exported& exported);

}  // namespace penstock::internal
