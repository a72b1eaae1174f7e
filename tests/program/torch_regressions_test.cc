// Cases that torch.distributed.pipelining gets wrong when it traces and splits a model. Each test is named for
// what holds here.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "penstock/program/pipe.h"
#include "penstock/program/program.h"
#include "penstock/tensor/intra_op_threads.h"
#include "tests/program/piped.h"
#include "tests/program/programs.h"
#include "tests/program/zoo.h"
#include "tests/tensor/values.h"

namespace penstock::internal::testing {

namespace {

constexpr SplitPoint kBegin = SplitPoint::BEGINNING;

Program from_zoo(const std::string& name) {
  return zoo_model(name).program();
}

TEST(TorchRegressions, SharedParametersHaveTheirGradientsSummed) {
  const Pipe pipe = pipeline(exported("tied"), {{"head", kBegin}});
  const Outcome found = run_in_stages(pipe, in_a_row("1F1B", 2));
  const at::Tensor first = found.gradients.at({0, "embedding.weight"});
  const at::Tensor second = found.gradients.at({1, "embedding.weight"});
  EXPECT_TRUE(same_bits(first, second));
  // They stay one weight after an optimizer step.
  PENSTOCK_ON_CPU_ALONE("devices have copies of the parameters of the program");
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> copies;
  for (int stage = 0; stage < 2; ++stage) {
    for (const auto& [name, parameter] : pipe.get_stage_module(stage).parameters) {
      if (name != "embedding.weight") continue;
      parameter.sub_(parameter.grad(), 0.1);
      copies.push_back(parameter);
    }
  }
  ASSERT_EQ(copies.size(), 2U);
  EXPECT_TRUE(same_bits(copies[0], copies[1]));
}

TEST(TorchRegressions, StagesSwitchBetweenTrainingAndEvaluation) {
  Pipe pipe = pipeline(exported("dropouts"), 2);
  const Schedule schedule = in_a_row("1F1B", 2);
  Pipeline pipeline(pipe.build(test_device), schedule, step_options());
  const Arguments batch = batch_of(pipe.program());
  const auto evaluated = [&] { return pipeline.eval(batch.args, batch.kwargs).output.toTensor(); };
  EXPECT_FALSE(same_bits(evaluated(), evaluated()));
  pipe.eval();
  const at::Tensor output = evaluated();
  EXPECT_TRUE(same_bits(output, evaluated()));
  std::vector<at::Tensor> rows;
  const c10::NoGradGuard no_grad;
  // Ranks use one intra-op thread, and the number of threads affects rounding.
  const IntraOpThreads threads(1);
  for (const Arguments& one : microbatches_of(pipe.program())) {
    rows.push_back(pipe.program().run(one.args, one.kwargs).toTensor());
  }
  EXPECT_TRUE(same_bits(at::cat(rows), output));
  pipe.train();
  EXPECT_FALSE(same_bits(evaluated(), evaluated()));
}

TEST(TorchRegressions, ValuesThatSeveralStagesUseAreTrained) {
  const auto cut = [](const std::string& name, const SplitSpec& spec) {
    return [=] { return pipeline(from_zoo(name), spec); };
  };
  const MakePipe several = cut("several_users", {{"b", kBegin}, {"c", kBegin}, {"d", kBegin}});
  expect_what_one_process_gives(several, in_a_row("GPipe", 4));
  expect_what_one_process_gives(several, in_a_row("1F1B", 4));
  // The same holds with several stages on a rank.
  expect_what_one_process_gives(several, in_a_row("Interleaved1F1B", 2, 2));
  expect_what_one_process_gives(several, in_a_row("ZBVZeroBubble", 2, 2));
  expect_what_one_process_gives([] { return pipeline(from_zoo("unet"), 4); }, in_a_row("Interleaved1F1B", 2, 2));
}

TEST(TorchRegressions, AnInputMayFirstBeUsedByALaterStage) {
  const MakePipe make = [] { return pipeline(from_zoo("late_input"), {{"layers.0", kBegin}, {"layers.1", kBegin}}); };
  expect_what_one_process_gives(make, in_a_row("1F1B", 3));
}

TEST(TorchRegressions, KeywordArgumentsReachLaterStages) {
  // `y` is a keyword argument.
  const MakePipe make = [] {
    return pipeline(from_zoo("reference_example"), [](const Node& node) { return node.name == "mm" ? 0 : 1; });
  };
  expect_what_one_process_gives(make, in_a_row("1F1B", 2));
}

TEST(TorchRegressions, AModelCanBeCutAgain) {
  const Program program = exported("dropouts");
  for (int i = 0; i < 3; ++i) EXPECT_EQ(pipeline(program, {{"blocks.1", kBegin}}).num_stages(), 2);
  EXPECT_EQ(pipeline(program, {{"blocks.2", kBegin}}).num_stages(), 2);
}

TEST(TorchRegressions, ConsecutiveMarksMakeOneCut) {
  const Pipe pipe = pipeline(exported("leading_marks"));
  ASSERT_EQ(pipe.num_stages(), 2);
  for (int stage = 0; stage < 2; ++stage) EXPECT_FALSE(pipe.get_stage_module(stage).parameters.empty());
  expect_what_one_process_gives([] { return pipeline(exported("leading_marks")); }, in_a_row("1F1B", 2));
  expect_what_one_process_gives([] { return pipeline(from_zoo("consecutive_marks")); }, in_a_row("1F1B", 2));
}

TEST(TorchRegressions, NonPersistentBuffersAreNotInTheStateDict) {
  const Pipe pipe = pipeline(exported("tied"), {{"frozen", kBegin}});
  bool used = false;
  for (const auto& [name, buffer] : pipe.get_stage_module(0).buffers) used = used || name == "scale.shift";
  EXPECT_TRUE(used);
  for (int stage = 0; stage < pipe.num_stages(); ++stage) {
    for (const auto& [name, tensor] : pipe.state_dict(stage)) EXPECT_NE(name, "scale.shift");
  }
}

TEST(TorchRegressions, MultiUseParameterConfigIsFollowed) {
  const Program program = exported("tied");
  const std::vector<int> cut = split_at(program, {{"head", kBegin}});
  const Pipe copied(program, cut, MultiUseParameterConfig::REPLICATE);
  const Pipe sent(program, cut, MultiUseParameterConfig::TRANSMIT);
  const auto has_it = [](const Pipe& pipe, int stage) {
    for (const auto& [name, tensor] : pipe.get_stage_module(stage).parameters) {
      if (name == "embedding.weight") return true;
    }
    return false;
  };
  EXPECT_TRUE(has_it(copied, 0) && has_it(copied, 1));
  EXPECT_TRUE(has_it(sent, 0) && !has_it(sent, 1));
  EXPECT_EQ(sent.info().boundary_values.size(), copied.info().boundary_values.size() + 1);
}

TEST(TorchRegressions, BatchNormalisationSeesEachMicrobatchOnce) {
  const Pipe pipe = pipeline(exported("norms"), 2);
  const Outcome found = run_in_stages(pipe, in_a_row("1F1B", 2));
  int counters = 0;
  for (const auto& [name, buffer] : found.buffers) {
    if (!name.ends_with("num_batches_tracked")) continue;
    EXPECT_EQ(buffer.item<std::int64_t>(), kMicrobatches) << name;
    ++counters;
  }
  EXPECT_EQ(counters, 2);
}

TEST(TorchRegressions, IndicesFlagsAndViewsPassBetweenStages) {
  const MakePipe make = [] { return pipeline(exported("indices"), {{"look", kBegin}, {"head", kBegin}}); };
  expect_what_one_process_gives(make, in_a_row("1F1B", 3));
  const MakePipe two = [] { return pipeline(exported("indices"), {{"look", kBegin}}); };
  expect_what_one_process_gives(two, in_a_row("ZBVZeroBubble", 1, 2));
  expect_what_one_process_gives([] { return pipeline(exported("indices"), 4); }, in_a_row("ZBVZeroBubble", 2, 2));
}

TEST(TorchRegressions, DictOutputsAreMerged) {
  const Pipe pipe = pipeline(exported("indices"), {{"head", kBegin}});
  Pipeline pipeline(pipe.build(test_device), in_a_row("1F1B", 2), step_options());
  const Arguments batch = batch_of(pipe.program());
  const c10::IValue output = pipeline.step(batch.args, batch.kwargs, at::Tensor()).output;
  EXPECT_EQ(output.toGenericDict().at("logits").toTensor().size(0), 3 * kMicrobatches);
}

TEST(TorchRegressions, SizesThatTheExportDoesNotAllowAreRefused) {
  const Pipe pipe = pipeline(exported("pair"), 2);
  Pipeline pipeline(pipe.build(test_device), in_a_row("1F1B", 2), step_options());
  try {
    pipeline.step({at::ones({8, 4})}, {}, at::Tensor());
    ADD_FAILURE() << "no error";
  } catch (const PipelineError& error) {
    EXPECT_NE(std::string(error.what()).find("args.0, dimension 0: found 2, expected 3, which is static."),
              std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace penstock::internal::testing
