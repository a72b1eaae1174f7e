// A program that is split into stages: its statistics, and that it computes the same as the whole.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "penstock/tensor/random_scope.h"
#include "tests/program/cuts.h"
#include "tests/program/piped.h"
#include "tests/tensor/values.h"

namespace penstock::internal::testing {
namespace {

TEST(Pipe, SendsANumberToTheStageThatUsesIt) {
  const auto make = [] { return pipeline(exported("number"), {{"second", kBegin}}); };
  const Program program = make().program();
  EXPECT_EQ(boundary_values_of(make()), (Words{"relu 0 -> 1", "times 0 -> 1"}));
  const TensorsByName inputs{{"args.0", counting({12, 4})}, {"args.1", at::full({4}, 3, at::kLong)}};
  expect_what_one_process_gives(make, in_a_row("1F1B", 2), inputs);

  const auto expect_error_for = [&](const at::Tensor& number, const std::string& message) {
    expect_error<ProgramError>([&] { arguments_from(program, {{"args.0", counting({3, 4})}, {"args.1", number}}); },
                               message);
  };
  expect_error_for(at::arange(4), "args.1: found several numbers, expected one, the same for all microbatches.");
  expect_error_for(at::empty({0}, at::kLong), "args.1: found no number, expected one, the same for all microbatches.");
  expect_error_for(at::ones({1}), "args.1: found float32, expected an integer.");
}

TEST(Pipe, LeavesTheProgramAsItWas) {
  const Program program = exported("dropouts");
  NamedTensors before;
  for (const auto& [name, tensor] : program.state_dict()) before.emplace_back(name, tensor.detach().clone());
  const std::string nodes = row_of(program, SplitSpec{});
  const Pipe first = pipeline(program, {{"blocks.1", kBegin}});
  const Pipe second = pipeline(program, {{"blocks.1", kBegin}, {"blocks.2", kBegin}});
  const Pipe third = pipeline(program, {{"blocks.1", kBegin}});
  EXPECT_EQ(first.num_stages(), 2);
  EXPECT_EQ(second.num_stages(), 3);
  EXPECT_EQ(third.stages(), first.stages());
  EXPECT_EQ(row_of(program, SplitSpec{}), nodes);
  const NamedTensors after = program.state_dict();
  ASSERT_EQ(before.size(), after.size());
  for (std::size_t i = 0; i < before.size(); ++i) {
    EXPECT_EQ(before[i].first, after[i].first);
    EXPECT_TRUE(same_bits(before[i].second, after[i].second));
  }
  const Arguments arguments = arguments_from(program, example_inputs(program, 1, 1));
  const auto run = [&](const auto& one) {
    const RandomScope scope(1, 2, 3, 4);
    return one.run(arguments.args, arguments.kwargs);
  };
  EXPECT_TRUE(same(run(program), run(first)));
  EXPECT_TRUE(same(run(program), run(second)));
  EXPECT_TRUE(same(run(program), run(third)));
}

// The meta device computes shapes only, and refuses tensors on another device.
TEST(Pipe, PutsStagesOnAnotherDevice) {
  for (const std::string name : {"mlp", "called_twice"}) {
    SCOPED_TRACE(name);
    const ZooModel model = zoo_model(name);
    const Pipe pipe = pipeline(model.program(), 2);
    StagedModel staged = pipe.build(at::kMeta);
    for (const PipelineStage& stage : staged.stages()) {
      for (const auto& [parameter, tensor] : stage.parameters()) EXPECT_TRUE(tensor.is_meta()) << parameter;
    }
    Pipeline in_stages(std::move(staged), generate("1F1B", {.ranks = 2, .microbatches = 1}), step_options());
    Arguments arguments = microbatches_of(model, pipe.program()).front();
    const c10::IValue expected = pipe.run(arguments.args, arguments.kwargs);
    for (c10::IValue& arg : arguments.args) arg = arg.toTensor().to(at::kMeta);
    const at::Tensor output = in_stages.step(arguments.args, arguments.kwargs, at::Tensor()).output.toTensor();
    EXPECT_TRUE(output.is_meta());
    EXPECT_EQ(output.sizes(), expected.toTensor().sizes());
    for (const PipelineStage& stage : in_stages.stages()) {
      for (const auto& [parameter, tensor] : stage.parameters()) EXPECT_TRUE(tensor.grad().is_meta()) << parameter;
    }
    // The program itself stays on its device.
    for (const auto& [parameter, tensor] : pipe.program().parameters()) EXPECT_TRUE(tensor.is_cpu()) << parameter;
  }
}

TEST(Pipe, SaysWhichStagesThereAre) {
  const Pipe pipe = pipeline(exported("pair"), 2);
  for (const int stage : {-1, 2}) {
    const std::string message = "there is no stage " + std::to_string(stage) + "; the stages are 0 to 1.";
    expect_error<ProgramError>([&] { pipe.get_stage_module(stage); }, message);
    expect_error<ProgramError>([&] { pipe.build_stage(stage); }, message);
    expect_error<ProgramError>([&] { pipe.state_dict(stage); }, message);
  }
}

TEST(Pipe, KeepsNamesAndTensors) {
  for (const std::string name : {"tied", "norms", "dropouts", "masked"}) {
    SCOPED_TRACE(name);
    const Program program = exported(name);
    const Pipe pipe = pipeline(program, 3);
    std::set<std::string> names;
    for (int stage = 0; stage < 3; ++stage) {
      for (const auto& [key, tensor] : pipe.state_dict(stage)) names.insert(key);
    }
    std::set<std::string> expected;
    for (const auto& [key, tensor] : program.state_dict()) expected.insert(key);
    EXPECT_EQ(names, expected);
    EXPECT_TRUE(pipe.get_stage_module(0).parameters[0].second.is_same(program.parameters()[0].second));
  }
}

TEST(Pipe, KnowsWhichBuffersNoForwardWritesTo) {
  const Pipe masked = pipeline(zoo_model("gqa").program(), {{"blocks.1", SplitPoint::BEGINNING}});
  for (int stage = 0; stage < 2; ++stage) {
    EXPECT_TRUE(masked.get_stage_module(stage).constant_buffers.contains("allowed"));
    EXPECT_EQ(masked.info().stages[static_cast<std::size_t>(stage)].buffer_bytes.at("allowed"), 16 * 16);
  }
  const Pipe normalised = pipeline(zoo_model("resnet").program(), 1);
  EXPECT_FALSE(normalised.get_stage_module(0).buffers.empty());
  EXPECT_EQ(normalised.get_stage_module(0).constant_buffers, std::set<std::string>{});
}

TEST(Pipe, LoadsAStageByTheNamesThatItHas) {
  const Program program = exported("pair");
  const Pipe pipe = pipeline(program, {{"second", kBegin}});
  NamedTensors state;
  for (const auto& [name, tensor] : pipe.state_dict(1)) state.emplace_back(name, at::ones_like(tensor));
  pipe.load_state_dict(1, state);
  EXPECT_EQ(pipe.run({at::zeros({3, 4})}).toTensor().min().item<double>() > 0.99, true);
  state[0].second = at::ones({1});
  expect_error<ProgramError>([&] { pipe.load_state_dict(1, state); },
                             "stage 1: 'second.weight': found float32 tensor of shape [1], expected float32 tensor of "
                             "shape [2, 4].");
  state.erase(state.begin());
  expect_error<ProgramError>([&] { pipe.load_state_dict(1, state); }, "stage 1: 'second.weight' is missing.");
}

TEST(Pipe, IsPrinted) {
  const auto printed = [](const Pipe& pipe) {
    std::ostringstream text;
    text << pipe;
    return text.str();
  };
  EXPECT_EQ(printed(pipeline(exported("pair"), {{"second", kBegin}})),
            program_path("pair.pt2") +
                ": 2 stages\n"
                "  stage 0: first\n"
                "    20 parameters, 108 FLOP a forward, 96 B of saved activations\n"
                "    -> stage 1: relu float32[3, 4]\n"
                "  stage 1: second\n"
                "    10 parameters, 48 FLOP a forward, 24 B of saved activations\n");
  EXPECT_EQ(printed(pipeline(exported("tied"), {{"head", kBegin}})),
            program_path("tied.pt2") +
                ": 2 stages\n"
                "  stage 0: embedding, scale, frozen\n"
                "    52 parameters, 264 FLOP a forward, 384 B of saved activations\n"
                "    -> stage 1: linear float32[2, 3, 4]\n"
                "  stage 1: head\n"
                "    32 parameters, 384 FLOP a forward, 192 B of saved activations\n"
                "  shared: embedding.weight by stages 0, 1\n");
  EXPECT_EQ(printed(pipeline(exported("identity"))),
            program_path("identity.pt2") +
                ": 1 stage\n"
                "  stage 0: 0 operations of the model itself\n"
                "    0 parameters, 0 FLOP a forward, 0 B of saved activations\n");
}

TEST(RandomNumbers, AreTheSameForAnyCutAndSchedule) {
  struct Case {
    const char* schedule;
    int ranks;
    int stages_per_rank;
  };
  const std::vector<Case> cases = {{"1F1B", 1, 1},
                                   {"1F1B", 2, 1},
                                   {"1F1B", 4, 1},
                                   {"GPipe", 3, 1},
                                   {"Interleaved1F1B", 1, 3},
                                   {"Interleaved1F1B", 2, 2},
                                   {"ZBVZeroBubble", 1, 2},
                                   {"ZBVZeroBubble", 2, 2}};
  const auto make = [](int stages) { return pipeline(exported("dropouts"), stages); };
  ASSERT_TRUE(make(1).program().is_training());
  const Outcome whole = run_in_one_process(make(1), in_a_row("1F1B", 1), /*seed=*/11);
  for (const Case& one : cases) {
    SCOPED_TRACE(std::string(one.schedule) + " on " + std::to_string(one.ranks) + " ranks");
    const Schedule schedule = in_a_row(one.schedule, one.ranks, one.stages_per_rank);
    const MakePipe cut = [&] { return make(schedule.stages()); };
    expect_what_one_process_gives(cut, schedule, /*seed=*/11);
    // The random numbers do not depend on the split.
    const Outcome found = run_in_stages(cut(), schedule, /*seed=*/11);
    for (std::size_t i = 0; i < found.losses.size(); ++i) EXPECT_TRUE(same(whole.losses[i], found.losses[i])) << i;
  }
}

TEST(RandomNumbers, AreTheSameWhereverABlockIsCut) {
  const Outcome whole = run_in_one_process(pipeline(exported("dropouts"), 1), in_a_row("1F1B", 1), /*seed=*/11);
  const Program program = exported("dropouts");
  for (int at = 1; at < static_cast<int>(program.graph().nodes.size()); ++at) {
    SCOPED_TRACE("before " + describe(program.graph(), program.graph().nodes[static_cast<std::size_t>(at)]));
    std::vector<int> stages(program.graph().nodes.size(), 0);
    std::fill(stages.begin() + at, stages.end(), 1);
    const Outcome found = run_in_stages(Pipe(exported("dropouts"), stages), in_a_row("1F1B", 2), /*seed=*/11);
    for (std::size_t i = 0; i < found.losses.size(); ++i) EXPECT_TRUE(same(whole.losses[i], found.losses[i])) << i;
    // Every parameter is in one of the stages; with one stage, the order of microbatches is the same.
    std::size_t count = 0;
    for (const auto& [place, gradient] : found.gradients) {
      EXPECT_TRUE(same_bits(whole.gradients.at({0, place.second}), gradient)) << place.second;
      ++count;
    }
    EXPECT_EQ(count, whole.gradients.size());
  }
}

TEST(RandomNumbers, AreOthersWithAnotherSeedAndInTheNextStep) {
  const auto make = [] { return pipeline(exported("dropouts"), 2); };
  const Schedule schedule = in_a_row("1F1B", 2);
  const Outcome one = run_in_stages(make(), schedule, /*seed=*/1);
  const Outcome again = run_in_stages(make(), schedule, /*seed=*/1);
  const Outcome other = run_in_stages(make(), schedule, /*seed=*/2);
  EXPECT_TRUE(same(one.losses[0], again.losses[0]));
  EXPECT_FALSE(same(one.losses[0], other.losses[0]));

  const Pipe pipe = make();
  Pipeline pipeline(pipe.build(test_device), schedule, step_options(/*seed=*/1));
  const Arguments batch = batch_of(pipe.program());
  const at::Tensor first = pipeline.step(batch.args, batch.kwargs, at::Tensor()).losses[0].cpu();
  EXPECT_TRUE(same(one.losses[0], first));
  EXPECT_FALSE(same(first, pipeline.step(batch.args, batch.kwargs, at::Tensor()).losses[0].cpu()));
}

}  // namespace
}  // namespace penstock::internal::testing
