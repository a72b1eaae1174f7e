// A StagedModel: stages with their wiring and shared parameters.
#include "penstock/stage/staged_model.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace penstock::internal::testing {
namespace {

PipelineStage stage_with(NamedTensors parameters, int index, int stages) {
  return {{.forward = [](const Args&, const Kwargs&) { return c10::IValue(); }, .parameters = std::move(parameters)},
          index,
          stages};
}

TEST(StagedModel, OfAListOfStagesIsAChain) {
  std::vector<PipelineStage> stages;
  for (int i = 0; i < 3; ++i) stages.push_back(stage_with({{"w", at::zeros({1})}}, i, 3));
  const StagedModel model = std::move(stages);
  EXPECT_EQ(model.stages().size(), 3U);
  EXPECT_EQ(model.wiring(), Wiring(3));
  EXPECT_TRUE(model.shared_parameters().empty());
}

TEST(StagedModel, SharesATensorThatSeveralStagesHave) {
  const at::Tensor tied = at::zeros({2});
  std::vector<PipelineStage> stages;
  stages.push_back(stage_with({{"embedding", tied}, {"again", tied}}, 0, 3));
  stages.push_back(stage_with({{"w", at::zeros({2})}}, 1, 3));
  stages.push_back(stage_with({{"head", tied}}, 2, 3));
  const StagedModel model = std::move(stages);
  EXPECT_EQ(model.shared_parameters(), (SharedParameters{{{0, "embedding"}, {0, "again"}, {2, "head"}}}));
}

TEST(StagedModel, MergesNamedParametersWithOneTensorThatTheyContain) {
  const at::Tensor tied = at::zeros({2});
  std::vector<PipelineStage> stages;
  stages.push_back(stage_with({{"w", tied}}, 0, 3));
  stages.push_back(stage_with({{"w", at::zeros({2})}}, 1, 3));
  stages.push_back(stage_with({{"w", tied}}, 2, 3));
  const StagedModel model(std::move(stages), Wiring(3), {{{1, "w"}, {2, "w"}}});
  EXPECT_EQ(model.shared_parameters(), (SharedParameters{{{1, "w"}, {2, "w"}, {0, "w"}}}));
}

TEST(StagedModel, NeedsAStageToKnowTheNumberOfStages) {
  std::string error;
  try {
    const StagedModel model(std::vector<PipelineStage>{});
  } catch (const StageError& thrown) {
    error = thrown.what();
  }
  EXPECT_EQ(error, "a model has no stages; expected at least 1.");
  // A process rank may have no stages of a wiring that it knows.
  const StagedModel empty({}, Wiring(2));
  EXPECT_TRUE(empty.stages().empty());
}

}  // namespace
}  // namespace penstock::internal::testing
