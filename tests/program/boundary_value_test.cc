// Boundary values between stages: values that are sent or recomputed, mutations in place, and shared parameters.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <vector>

#include "tests/program/cuts.h"
#include "tests/program/piped.h"
#include "tests/tensor/values.h"

namespace penstock::internal::testing {
namespace {

TEST(BoundaryValues, DoNotIncludeWhatIsCheapToRecompute) {
  const Pipe pipe = pipeline(exported("masked"), {{"layers.1", kBegin}, {"layers.2", kBegin}});
  EXPECT_EQ(boundary_values_of(pipe), (Words{"matmul_1 0 -> 1", "matmul_3 1 -> 2"}));
  // Each stage has the constant that the mask is computed from.
  for (const PipeInfo::Stage& stage : pipe.info().stages) EXPECT_EQ(stage.buffers, 5);
  EXPECT_EQ(pipe.info().boundary_values[0].type, "float32[2, 5, 4]");
  EXPECT_EQ(pipe.info().boundary_values[0].bytes, 160);
  expect_what_one_process_gives(
      [] { return pipeline(exported("masked"), {{"layers.1", kBegin}, {"layers.2", kBegin}}); }, in_a_row("1F1B", 3));
}

TEST(BoundaryValues, SendNumbersAsTensors) {
  const MakePipe make = [] { return pipeline(exported("length"), {{"second", kBegin}}); };
  const Pipe pipe = make();
  const auto& values = pipe.info().boundary_values;
  ASSERT_EQ(values.size(), 2U);
  EXPECT_EQ(boundary_values_of(pipe), (Words{"sum_1 0 -> 1", "sym_size_int_1 0 -> 1"}));
  EXPECT_EQ(values[1].type, "int");
  EXPECT_EQ(values[1].bytes, 8);
  expect_what_one_process_gives(make, in_a_row("1F1B", 2));
  // Other sizes work too.
  const at::Tensor x = at::ones({2, 9, 4});
  const auto output = pipe.run({x}).toTupleRef().elements().vec();
  EXPECT_EQ(output[1].toInt(), 17);
  EXPECT_TRUE(same(pipe.program().run({x}), pipe.run({x})));
}

TEST(BoundaryValues, DoNotIncludeASizeWhoseTensorIsSent) {
  const Pipe pipe = pipeline(exported("inputs"), {{"linear", kEnd}});
  std::vector<std::string> names = boundary_values_of(pipe);
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names, (Words{"linear 0 -> 1", "mask 0 -> 1", "y_0 0 -> 1"}));
}

TEST(BoundaryValues, IncludeAnInputThatOnlyALaterStageUses) {
  const MakePipe make = [] { return pipeline(from_zoo("late_input"), {{"layers.0", kBegin}, {"layers.1", kBegin}}); };
  EXPECT_EQ(boundary_values_of(make()), (Words{"tanh 0 -> 1", "late 0 -> 2", "tanh_1 1 -> 2", "tanh 1 -> 2"}));
  expect_what_one_process_gives(make, in_a_row("1F1B", 3));
}

TEST(BoundaryValues, SendAnOutputOfTheFirstStageToTheLast) {
  const Pipe pipe = pipeline(from_zoo("late_input"), {{"layers.0", kBegin}, {"last", kBegin}});
  const Program& program = pipe.program();
  const Arguments arguments = arguments_from(program, example_inputs(program, 1, 3));
  EXPECT_TRUE(same(program.run(arguments.args, arguments.kwargs), pipe.run(arguments.args, arguments.kwargs)));
}

TEST(BoundaryValues, TravelFromConsumerToConsumer) {
  const Pipe pipe = pipeline(from_zoo("several_users"), {{"b", kBegin}, {"c", kBegin}, {"d", kBegin}});
  // Stage 0 produces the value for all of them; stage 1 forwards it to stage 2, and stage 2 to stage 3.
  const std::string made = pipe.info().boundary_values.front().name;
  std::vector<std::string> ways;
  for (const PipeInfo::BoundaryValue& one : pipe.info().boundary_values) {
    if (one.name == made) ways.push_back(std::to_string(one.from) + " -> " + std::to_string(one.to));
  }
  EXPECT_EQ(ways, (Words{"0 -> 1", "1 -> 2", "2 -> 3"}));
}

TEST(Buffers, ThatALaterStageWritesToCannotBeReadBefore) {
  const Program program = exported("written_later");
  expect_error<ProgramError>(
      [&] { pipeline(program, {{"second", kBegin}}); },
      "'second.count' is written to in stage 1, and node 'mul' (torch.ops.aten.mul.Tensor) of "
      "module 'first' (__main__.Reads) uses it in stage 0: the next microbatch would not see what "
      "was written.\n  Hint: cut so that both are in one stage.");
  EXPECT_EQ(pipeline(program, {{"second.linear", kBegin}}).num_stages(), 2);
}

class Buffered : public ::testing::TestWithParam<std::string> {};

TEST_P(Buffered, AreReadAfterTheStageThatWritesToThem) {
  expect_what_one_process_gives([] { return pipeline(exported("counted"), {{"second", kBegin}}); },
                                in_a_row(GetParam(), 2));
}

// Each forward saves the content of the buffer for its own backward, although the next forward writes to it before
// that.
TEST_P(Buffered, AreKeptForTheBackwardAsTheyWere) {
  expect_what_one_process_gives([] { return pipeline(exported("averaged"), {{"layers.1", kBegin}}); },
                                in_a_row(GetParam(), 2));
}

TEST_P(Buffered, LearnInEveryStage) {
  expect_what_one_process_gives([] { return pipeline(exported("norms"), 2); }, in_a_row(GetParam(), 2));
}

INSTANTIATE_TEST_SUITE_P(Schedules, Buffered, ::testing::Values("GPipe", "1F1B"),
                         [](const auto& one) { return one.param == "1F1B" ? "OneFOneB" : one.param; });

TEST(InPlace, WritesThatOnlyEvaluationSeesAreRefusedAcrossStages) {
  expect_error<ProgramError>(
      [&] {
        pipeline(exported("ambiguous_alias"), [&](const Node& node) {
          return node.name == "linear" || node.name == "dropout" ? 0 : node.name == "mul_" ? 1 : 2;
        });
      },
      "node 'mul_' (torch.ops.aten.mul_.Tensor) of module 'doubles' (__main__.AmbiguousAlias.Doubles) writes in place "
      "to "
      "what node 'linear_1' (torch.ops.aten.linear.default) of module 'last.linear' (torch.nn.modules.linear.Linear) "
      "uses in another stage; the two are one tensor in evaluation mode only: 'linear' and 'dropout'.\n  Hint: cut so "
      "that both are in one stage.");
}

// Both tensors are used in one stage, and both come from another one.
TEST(InPlace, WritesThatOnlyEvaluationSeesAreSeenOrRefusedAfterABoundary) {
  Program program = exported("ambiguous_alias");
  program.eval();
  const at::Tensor x = counting({2, 4});
  try {
    const Pipe pipe = pipeline(program, {{"doubles", kBegin}});
    const Schedule schedule = generate("GPipe", {.ranks = 2, .microbatches = 1});
    Pipeline in_stages(pipe.build(test_device), schedule, step_options());
    EXPECT_TRUE(same(program.run({x}).toTensor().detach(), on_host(in_stages.eval({x}).output)));
  } catch (const ProgramError& error) {
    EXPECT_NE(std::string(error.what()).find("the two are one tensor in evaluation mode only"), std::string::npos);
  }
}

TEST(Buffers, ThatAreWrittenAtTheEndAreNotReadAgainInALaterStage) {
  for (const std::string name : {"GPipe", "1F1B"}) {
    expect_what_one_process_gives([] { return pipeline(exported("counted_at_the_end")); }, in_a_row(name, 2));
  }
}

TEST(Buffers, ThatAreCopiedToThemselvesAreLeftAsTheyAre) {
  expect_what_one_process_gives([] { return pipeline(exported("plus_equals"), 1); }, in_a_row("1F1B", 1));
  EXPECT_EQ(row_of(exported("plus_equals"), SplitSpec{}), "linear add_ mul");
}

TEST(BoundaryValues, RefuseATensorAndItsDetachedViewThatAreBothMutated) {
  const Program program = exported("detached_twice");
  EXPECT_NO_THROW(pipeline(program, {{"second", SplitPoint::BEGINNING}}));
  expect_error<ProgramError>(
      [&] { pipeline(program, {{"second", SplitPoint::BEGINNING}, {"third", SplitPoint::BEGINNING}}); },
      "'detach', a detached view of 'linear', is written to in stage 1, and node 'mul_' (torch.ops.aten.mul_.Tensor) "
      "of "
      "the model itself (__main__.DetachedTwice) uses 'linear', the same memory, in stage 2, where one of them is "
      "written "
      "to again.\n  Hint: cut so that both are in one stage.");
}

TEST(BoundaryValues, RefuseASparseTensor) {
  const Program program = exported("sparse_crosses");
  expect_error<ProgramError>(
      [&] { pipeline(program, {{"first", SplitPoint::BEGINNING}}); },
      "stage 1 uses 'to_sparse', a sparse tensor of stage 0; sparse tensors cannot be sent.\n  Hint: cut so "
      "that both are in one stage.");
}

TEST(Buffers, ThatAreViewsOfWhatIsWrittenAreRefused) {
  expect_error<ProgramError>([] { exported("view_of_written"); },
                             program_path("view_of_written.pt2") +
                                 ": 'whole' is mutated and shares storage with 'part'; a mutated tensor needs storage "
                                 "of its own.");
}

TEST(InPlace, WritesAreSeenByLaterStages) {
  const ZooModel model = zoo_model("inplace");
  for (const ZooCut& cut : model.cuts) {
    SCOPED_TRACE(cut.why);
    const Pipe pipe = pipeline(model.program(), cut.at);
    const Program whole = model.program();
    for (const Arguments& arguments : microbatches_of(model, whole)) {
      EXPECT_TRUE(same(whole.run(arguments.args, arguments.kwargs), pipe.run(arguments.args, arguments.kwargs)));
    }
  }
}

// The microbatches are views of one batch.
TEST(InPlace, WritesToAnInputDoNotReachOtherMicrobatches) {
  expect_what_one_process_gives([] { return pipeline(exported("writes_input"), {{"second", kBegin}}); },
                                in_a_row("1F1B", 2));
}

struct Shared {
  std::string name;
  Program (*read)(const std::string&);
  SplitSpec cut;
};

std::vector<Shared> shared_models() {
  return {
      {"tied", exported, {{"head", kBegin}}},
      {"shared_across", from_zoo, {{"middle", kBegin}}},
      {"called_twice", from_zoo, {{"middle", kBegin}}},
      {"reference_example", from_zoo, {{"linear0", kEnd}}},
  };
}

TEST(MultiUse, OfAParameterInSeveralStagesIsReported) {
  const Pipe pipe = pipeline(from_zoo("shared_across"), {{"middle", kBegin}});
  const std::vector<std::map<int, std::string>> expected = {{{0, "first.linear.weight"}, {1, "first.linear.weight"}},
                                                            {{0, "first.linear.bias"}, {1, "first.linear.bias"}}};
  EXPECT_EQ(pipe.replicated_params(), expected);
  ASSERT_EQ(pipe.shared_parameters().size(), 2U);
  EXPECT_EQ(pipe.shared_parameters()[0],
            (std::vector<SharedParameter>{{0, "first.linear.weight"}, {1, "first.linear.weight"}}));
  // The state_dict of a stage has all names of a tied parameter.
  std::set<std::string> names;
  for (const auto& [name, tensor] : pipe.state_dict(1)) names.insert(name);
  EXPECT_TRUE(names.contains("first.linear.weight"));
  EXPECT_TRUE(names.contains("last.linear.weight"));
}

TEST(MultiUse, WithoutAGradientAnywhereHasNone) {
  const MakePipe make = [] { return pipeline(exported("shared_without_grad")); };
  ASSERT_EQ(make().replicated_params().size(), 2U);
  expect_what_one_process_gives(make, in_a_row("1F1B", 2));
}

TEST(MultiUse, ByCopiesGivesTheGradientsOfOneProcess) {
  for (const Shared& model : shared_models()) {
    SCOPED_TRACE(model.name);
    const MakePipe make = [&] { return pipeline(model.read(model.name), model.cut); };
    EXPECT_FALSE(make().shared_parameters().empty());
    const Pipe pipe = make();
    const auto& places = pipe.shared_parameters().front();
    const auto tensor = [&](int stage) {
      for (const auto& [name, parameter] : pipe.get_stage_module(stage).parameters) {
        if (name == places.front().name) return parameter;
      }
      return at::Tensor();
    };
    EXPECT_FALSE(tensor(0).is_alias_of(tensor(1)));
    EXPECT_TRUE(same_bits(tensor(0), tensor(1)));
    for (const char* const schedule : {"GPipe", "1F1B"}) {
      expect_what_one_process_gives(make, in_a_row(schedule, make().num_stages()));
    }
  }
}

// The head of the GPT is tied to its embedding. pipe.build() carries that, as in the README.
TEST(MultiUse, OfATiedWeightTrainsAsInOneProcess) {
  constexpr int kSteps = 3;
  constexpr double kRate = 0.5;
  const auto cross_entropy = [](const c10::IValue& output, const c10::IValue& target, const Kwargs&) {
    return at::cross_entropy_loss(output.toTensor().flatten(0, 1), target.toTensor().flatten());
  };
  const Schedule schedule = generate("1F1B", {.ranks = 2, .microbatches = kMicrobatches});
  const Pipe pipe = pipeline(from_zoo("gpt"), /*stages=*/2);
  Pipeline pipeline(pipe.build(test_device), schedule, {.loss = cross_entropy});

  const Program whole = from_zoo("gpt");
  const at::Tensor ids = inputs_of(whole).begin()->second;
  const std::vector<at::Tensor> chunks = ids.chunk(kMicrobatches);
  ASSERT_EQ(pipe.replicated_params().size(), 1U);
  for (int step = 0; step < kSteps; ++step) {
    pipeline.step({ids}, {}, ids);
    for (const at::Tensor& chunk : chunks) {
      (cross_entropy(whole.run({chunk}), chunk, {}) / kMicrobatches).backward();
    }
    const at::NoGradGuard no_grad;
    std::map<std::string, at::Tensor> expected;
    std::set<const void*> seen;
    for (const auto& [name, parameter] : whole.parameters()) {
      if (seen.insert(parameter.unsafeGetTensorImpl()).second) {
        parameter.sub_(parameter.grad(), kRate);
        parameter.mutable_grad().reset();
      }
      expected.emplace(name, parameter);
    }
    for (const PipelineStage& stage : pipeline.stages()) {
      for (const auto& [name, parameter] : stage.parameters()) {
        parameter.sub_(parameter.grad(), kRate);
        parameter.mutable_grad().reset();
        EXPECT_LE((parameter.cpu() - expected.at(name)).abs().max().item<double>(), 1e-5)
            << name << " of stage " << stage.stage_index() << " after step " << step;
      }
    }
  }
}

TEST(MultiUse, BySendingGivesTheGradientsOfOneProcessBitwise) {
  for (const Shared& model : shared_models()) {
    SCOPED_TRACE(model.name);
    const MakePipe make = [&] {
      const Program program = model.read(model.name);
      return Pipe(program, split_at(program, model.cut), MultiUseParameterConfig::TRANSMIT);
    };
    const Pipe pipe = make();
    EXPECT_TRUE(pipe.shared_parameters().empty());
    EXPECT_TRUE(pipe.replicated_params().empty());
    // Each parameter is in one stage.
    std::set<std::string> names;
    for (int stage = 0; stage < pipe.num_stages(); ++stage) {
      for (const auto& [name, tensor] : pipe.get_stage_module(stage).parameters) {
        EXPECT_TRUE(names.insert(name).second) << name;
      }
    }
    for (const char* const schedule : {"GPipe", "1F1B"}) {
      expect_what_one_process_gives(make, in_a_row(schedule, pipe.num_stages()));
    }
    expect_what_one_process_gives(make, in_a_row("Interleaved1F1B", 1, pipe.num_stages()));
    if (pipe.num_stages() == 2) expect_what_one_process_gives(make, in_a_row("ZBVZeroBubble", 1, 2));
  }
}

}  // namespace
}  // namespace penstock::internal::testing
