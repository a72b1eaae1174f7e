// Schedules and models for the tests of recomputation.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "penstock/schedule/generators.h"
#include "penstock/schedule/passes.h"
#include "penstock/stage/checkpoint.h"
#include "tests/runtime/models.h"

namespace penstock::internal::testing {

inline int count_recomputations(const Schedule& schedule) {
  int count = 0;
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    for (const Action& action : schedule.actions(rank)) count += action.computation == Computation::Recompute ? 1 : 0;
  }
  return count;
}

// Returns the model with each stage's forward as a checkpointed part.
inline Model checkpointed(Model model) {
  for (StageModule& stage : model.stages) {
    stage.forward = [forward = stage.forward](const Args& args, const Kwargs& kwargs) -> c10::IValue {
      // The part must not write into its inputs, as some of these stages do.
      return checkpoint(
          [forward, kwargs](const c10::IValue& values) {
            Args copies;
            for (const c10::IValue& value : values.toTupleRef().elements()) {
              copies.push_back(value.isTensor() ? c10::IValue(value.toTensor().clone()) : value);
            }
            return forward(copies, kwargs);
          },
          c10::IValue(c10::ivalue::Tuple::create(args)));
    };
  }
  return model;
}

inline Model unchanged(Model model) {
  return model;
}

struct RecomputedCase {
  std::string schedule;
  int ranks;
  int microbatches;
};
inline std::vector<RecomputedCase> recomputed_cases() {
  std::vector<RecomputedCase> cases;
  for (const Generator& generator : generators()) {
    for (const int ranks : {1, 2, 4}) {
      for (const int microbatches : {1, 3, 8}) cases.push_back({std::string(generator.name), ranks, microbatches});
    }
  }
  return cases;
}

class EveryRecomputedSchedule : public ::testing::TestWithParam<RecomputedCase> {
 protected:
  Schedule schedule() const {
    return generate(GetParam().schedule, {.ranks = GetParam().ranks, .microbatches = GetParam().microbatches});
  }
};

inline std::string name_of_case(const ::testing::TestParamInfo<RecomputedCase>& info) {
  return info.param.schedule + "_" + std::to_string(info.param.ranks) + "_ranks_" +
         std::to_string(info.param.microbatches) + "_microbatches";
}

}  // namespace penstock::internal::testing
