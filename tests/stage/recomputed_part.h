// Counts of recomputed parts, for the tests of recomputation.
#pragma once

#include <cstdint>

#include "penstock/stage/recomputation.h"

namespace penstock::internal::testing {

// Counts the parts that were made and computed again since it was constructed.
class CountedParts {
 public:
  std::int64_t made() const { return recomputation_counts().made - before_.made; }
  std::int64_t recomputed() const { return recomputation_counts().recomputed - before_.recomputed; }

 private:
  RecomputationCounts before_ = recomputation_counts();
};

}  // namespace penstock::internal::testing
