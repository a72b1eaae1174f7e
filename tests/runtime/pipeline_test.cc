#include "penstock/runtime/pipeline.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "penstock/schedule/generators.h"
#include "penstock/schedule/passes.h"
#include "tests/runtime/models.h"

namespace penstock::internal::testing {
namespace {

struct GridCase {
  std::string schedule;
  int ranks;
  int microbatches;
};
std::vector<GridCase> grid() {
  std::vector<GridCase> cases;
  for (const Generator& generator : generators()) {
    for (const int ranks : {1, 2, 4}) {
      for (const int microbatches : {1, 2, 3, 4, 8})
        cases.push_back({std::string(generator.name), ranks, microbatches});
    }
  }
  return cases;
}

class EverySchedule : public ::testing::TestWithParam<GridCase> {
 protected:
  Schedule schedule() const {
    return generate(GetParam().schedule, {.ranks = GetParam().ranks, .microbatches = GetParam().microbatches});
  }
};
std::string name_of(const ::testing::TestParamInfo<GridCase>& info) {
  return info.param.schedule + "_" + std::to_string(info.param.ranks) + "_ranks_" +
         std::to_string(info.param.microbatches) + "_microbatches";
}
INSTANTIATE_TEST_SUITE_P(Threads, EverySchedule, ::testing::ValuesIn(grid()), name_of);

TEST_P(EverySchedule, GivesTheLossesOutputsAndGradientsOfOneProcess) {
  const Schedule made = schedule();
  if (!features_of(made).backward) return;
  for (const NamedModel& named : kModels) {
    expect_what_one_process_gives(named, made);
    if (HasFailure()) return;
  }
}

TEST_P(EverySchedule, EvaluatesBetweenSteps) {
  const Schedule made = schedule();
  const Model model = perceptron(made.stages());
  Pipeline pipeline(model.build(), made, {.loss = squared_error});
  const at::Tensor x = input_for(kModels[0], made.microbatches(), "x");
  const at::Tensor y = input_for(kModels[0], made.microbatches(), "y");
  const StepResult without_target = pipeline.eval({x});
  EXPECT_TRUE(without_target.losses.empty());
  const auto expected = plain(model, x, y, made.microbatches(), {.backward = false});
  EXPECT_TRUE(same_tensor(outputs_of(expected), without_target.output.toTensor()));
  EXPECT_FALSE(without_target.output.toTensor().requires_grad());
  for (const StageModule& stage : model.stages) EXPECT_FALSE(stage.parameters[0].second.grad().defined());
  if (!features_of(made).backward) return;

  pipeline.step({x}, {}, y);
  std::vector<at::Tensor> gradients;
  for (const StageModule& stage : model.stages) gradients.push_back(stage.parameters[0].second.grad().clone());
  const StepResult with_target = pipeline.eval({x}, {}, y);
  EXPECT_EQ(with_target.losses.size(), static_cast<std::size_t>(made.microbatches()));
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    EXPECT_TRUE(same_tensor(gradients[i], model.stages[i].parameters[0].second.grad()));
  }
}

TEST(PipelineErrors, OfAStageNameWhereItFailedAndTheOthers) {
  Model model = perceptron(4);
  model.stages[2].forward = [](const Args&, const Kwargs&) -> c10::IValue {
    throw std::runtime_error("the bearings are hot");
  };
  Pipeline pipeline(model.build(), generate("1F1B", {.ranks = 4, .microbatches = 4}), {.loss = squared_error});
  const at::Tensor x = input_for(kModels[0], 4, "x");
  try {
    pipeline.step({x}, {}, x);
    FAIL() << "no error";
  } catch (const PipelineError& error) {
    const std::string what = error.what();
    EXPECT_EQ(what.rfind("rank 2, stage 2, 2F0 (microbatch 0): the bearings are hot\n  rank 0: ", 0), 0U) << what;
  }
}

}  // namespace
}  // namespace penstock::internal::testing
