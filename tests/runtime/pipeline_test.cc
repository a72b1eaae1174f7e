#include "penstock/runtime/pipeline.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "penstock/schedule/generators.h"
#include "penstock/schedule/passes.h"
#include "tests/runtime/models.h"

namespace penstock::testing {
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

bool same_bits(const at::Tensor& one, const at::Tensor& other) {
  return one.defined() == other.defined() && (!one.defined() || at::equal(one, other));
}

// Rows for all microbatches, not the same number for each.
at::Tensor rows_for(int microbatches, const std::string& name) {
  return weight(name, {2 * microbatches + (microbatches > 1 ? 1 : 0), 4 * kWide}).detach();
}

// Models of one row take 8 numbers, the transformer four tokens of them.
at::Tensor input_for(const NamedModel& model, int microbatches, const std::string& name) {
  const at::Tensor rows = rows_for(microbatches, name);
  return std::string(model.name) == "transformer" ? rows : rows.narrow(1, 0, kWide).contiguous();
}

// What one process gives for a batch.
std::vector<PlainMicrobatch> plain(const Model& model, const at::Tensor& x, const at::Tensor& y, int microbatches,
                                   const PlainOptions& options) {
  const SplitArgs split = split_args_kwargs_into_chunks({x, y}, {}, microbatches);
  std::vector<PlainMicrobatch> results;
  for (int i = 0; i < microbatches; ++i) {
    const Args& own = split.args[static_cast<std::size_t>(i)];
    results.push_back(plain_microbatch(model, {own[0]}, own[1].toTensor(), i, 1.0 / microbatches, options));
  }
  return results;
}

at::Tensor outputs_of(const std::vector<PlainMicrobatch>& microbatches) {
  std::vector<at::Tensor> outputs;
  for (const PlainMicrobatch& one : microbatches) outputs.push_back(one.output);
  return at::cat(outputs);
}

TEST_P(EverySchedule, GivesTheLossesOutputsAndGradientsOfOneProcess) {
  const Schedule made = schedule();
  if (!features_of(made).backward) return;
  for (const NamedModel& named : kModels) {
    SCOPED_TRACE(named.name);
    const at::Tensor x = input_for(named, made.microbatches(), "x");
    const at::Tensor y = input_for(named, made.microbatches(), "y");
    const Model model = named.make(made.stages());
    Pipeline pipeline(model.pipeline_stages(), model.wiring, made, {.loss = squared_error});
    const StepResult result = pipeline.step({x}, {}, y);

    const Model again = named.make(made.stages());
    const std::vector<PlainMicrobatch> expected = plain(again, x, y, made.microbatches(), {});
    EXPECT_TRUE(at::equal(outputs_of(expected), result.output.toTensor()));
    for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(at::equal(expected[i].loss, result.losses[i])) << i;
    const auto sums = added_up(pipeline.schedule(), expected);
    for (std::size_t stage = 0; stage < model.stages.size(); ++stage) {
      for (std::size_t i = 0; i < model.stages[stage].parameters.size(); ++i) {
        const auto& [name, parameter] = model.stages[stage].parameters[i];
        if (name == "tied") continue;
        EXPECT_TRUE(same_bits(sums[stage][i], parameter.grad()))
            << "stage " << stage << ", " << name << "\nexpected " << sums[stage][i] << "\nfound " << parameter.grad();
      }
    }
    if (model.shares_across_stages) {
      const at::Tensor expected_sum = sums.front().back();
      const at::Tensor found = model.stages.front().parameters.back().second.grad();
      EXPECT_LE((expected_sum - found).abs().max().item<double>(), 1e-6 * expected_sum.abs().max().item<double>());
    }
    if (HasFailure()) return;
  }
}

TEST_P(EverySchedule, EvaluatesBetweenSteps) {
  const Schedule made = schedule();
  const Model model = perceptron(made.stages());
  Pipeline pipeline(model.pipeline_stages(), made, {.loss = squared_error});
  const at::Tensor x = input_for(kModels[0], made.microbatches(), "x");
  const at::Tensor y = input_for(kModels[0], made.microbatches(), "y");
  const StepResult without_target = pipeline.eval({x});
  EXPECT_TRUE(without_target.losses.empty());
  const auto expected = plain(model, x, y, made.microbatches(), {.backward = false});
  EXPECT_TRUE(at::equal(outputs_of(expected), without_target.output.toTensor()));
  EXPECT_FALSE(without_target.output.toTensor().requires_grad());
  for (const StageModule& stage : model.stages) EXPECT_FALSE(stage.parameters[0].second.grad().defined());
  if (!features_of(made).backward) return;

  pipeline.step({x}, {}, y);
  std::vector<at::Tensor> gradients;
  for (const StageModule& stage : model.stages) gradients.push_back(stage.parameters[0].second.grad().clone());
  const StepResult with_target = pipeline.eval({x}, {}, y);
  EXPECT_EQ(with_target.losses.size(), static_cast<std::size_t>(made.microbatches()));
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    EXPECT_TRUE(at::equal(gradients[i], model.stages[i].parameters[0].second.grad()));
  }
}

TEST(PipelineErrors, OfAStageNameWhereItFailedAndTheOthers) {
  Model model = perceptron(4);
  model.stages[2].forward = [](const Args&, const Kwargs&) -> c10::IValue {
    throw std::runtime_error("the bearings are hot");
  };
  Pipeline pipeline(model.pipeline_stages(), generate("1F1B", {.ranks = 4, .microbatches = 4}),
                    {.loss = squared_error});
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
}  // namespace penstock::testing
