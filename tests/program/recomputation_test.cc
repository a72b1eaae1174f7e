// Recomputation of exported programs: by modules, and by stages.
#include "penstock/stage/recomputation.h"

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "penstock/schedule/generators.h"
#include "penstock/schedule/passes.h"
#include "tests/program/cuts.h"
#include "tests/program/piped.h"
#include "tests/program/programs.h"
#include "tests/stage/recomputed_part.h"
#include "tests/thrown.h"

namespace penstock::internal::testing {
namespace {

struct ScheduleCase {
  std::string schedule;
  int ranks;
};
std::vector<ScheduleCase> schedules_with_backwards() {
  std::vector<ScheduleCase> cases;
  for (const Generator& generator : generators()) {
    for (const int ranks : {1, 2, 4}) {
      const Schedule made = generate(generator.name, {.ranks = ranks, .microbatches = 4});
      if (features_of(made).backward) cases.push_back({std::string(generator.name), ranks});
    }
  }
  return cases;
}

class EveryScheduleOfAGpt : public ::testing::TestWithParam<ScheduleCase> {};
INSTANTIATE_TEST_SUITE_P(Threads, EveryScheduleOfAGpt, ::testing::ValuesIn(schedules_with_backwards()),
                         [](const auto& one) {
                           return one.param.schedule + "_" + std::to_string(one.param.ranks) + "_ranks";
                         });

TEST_P(EveryScheduleOfAGpt, GivesTheSameAndWaitsForNoDevice) {
  const ZooModel model = zoo_model("gpt");
  const TensorsByName inputs = tensors_of(model.path(".inputs.safetensors"));
  const Schedule schedule =
      generate(GetParam().schedule, {.ranks = GetParam().ranks, .microbatches = model.microbatches});
  const auto make = [&] { return pipeline(model.program(), schedule.stages()); };
  const Outcome expected = run_in_one_process(make(), schedule, inputs, /*seed=*/3);
  const Pipe pipe = make();
  expect_same(expected, run_in_stages(pipe, schedule, inputs, /*seed=*/3), pipe.shared_parameters());
  Pipeline in_stages(pipe.build(test_device), schedule, step_options());
  const Arguments batch = arguments_from(pipe.program(), inputs);
  const std::uint64_t waits = host_waits();
  in_stages.step(batch.args, batch.kwargs, at::Tensor());
  EXPECT_EQ(host_waits(), waits);
}

TEST_P(EveryScheduleOfAGpt, GivesTheSameWhenItIsRecomputed) {
  const ZooModel model = zoo_model("gpt");
  const TensorsByName inputs = tensors_of(model.path(".inputs.safetensors"));
  const Schedule schedule =
      generate(GetParam().schedule, {.ranks = GetParam().ranks, .microbatches = model.microbatches});
  const auto make = [&] { return pipeline(model.program(), schedule.stages()); };
  const Outcome expected = run_in_one_process(make(), schedule, inputs, /*seed=*/3);
  {
    const Pipe pipe = make();
    Program program = pipe.program();
    program.recompute(program.repeated_modules());
    const CountedParts counted;
    expect_same(expected, run_in_stages(pipe, schedule, inputs, /*seed=*/3), pipe.shared_parameters());
    EXPECT_GT(counted.made(), 0);
    EXPECT_EQ(counted.recomputed(), counted.made());
  }
  const Pipe pipe = make();
  const CountedParts counted;
  const Schedule recomputed = add_recomputation(schedule);
  expect_same(expected, run_in_stages(pipe, recomputed, inputs, /*seed=*/3), pipe.shared_parameters());
  // A backward that directly follows its forward has no recomputation: on one rank, 1F1B has none at all.
  std::size_t recomputations = 0;
  for (int rank = 0; rank < recomputed.ranks(); ++rank) {
    recomputations += recomputed_microbatches(recomputed, rank).size();
  }
  EXPECT_EQ(static_cast<std::size_t>(counted.made()), recomputations);
  EXPECT_EQ(counted.recomputed(), counted.made());
}

TEST(RecomputedProgram, WritesIntoAParameterOnce) {
  for (const std::string name : {"written_parameter", "written_factor"}) {
    SCOPED_TRACE(name);
    const Schedule schedule = in_a_row("GPipe", 1);
    const Pipe plain_pipe = pipeline(exported(name), 1);
    const Outcome expected = run_in_one_process(plain_pipe, schedule);
    EXPECT_TRUE(at::allclose(expected.parameters.at("fading"), at::full({4}, 0.9 * 0.9 * 0.9 * 0.9)));
    const auto expect_the_same = [&](const std::vector<std::string>& modules, const Schedule& made) {
      const Pipe pipe = pipeline(exported(name), 1);
      Program program = pipe.program();
      program.recompute(modules);
      const Outcome found = run_in_stages(pipe, made, inputs_of(pipe.program()), /*seed=*/0);
      expect_same(expected, found);
      EXPECT_TRUE(at::equal(expected.parameters.at("fading"), found.parameters.at("fading")));
    };
    expect_the_same({}, schedule);
    expect_the_same({}, add_recomputation(schedule));
    expect_the_same({"first"}, schedule);
  }
}

TEST(RecomputedProgram, IsComparedWithAReferenceThatSavesAllActivations) {
  const Pipe pipe = pipeline(zoo_model("gpt").program(), 2);
  Program program = pipe.program();
  program.recompute(program.repeated_modules());
  const CountedParts counted;
  run_in_one_process(pipe, generate("GPipe", {.ranks = 2, .microbatches = kMicrobatches}));
  EXPECT_EQ(counted.made(), 0);
  const Arguments batch = microbatches_of(program).front();
  sum_of_means(program.run(batch.args, batch.kwargs)).backward();
  EXPECT_GT(counted.made(), 0);
}

TEST(RecomputedProgram, RestoresAWrittenParameterAfterAFailure) {
  const Pipe pipe = pipeline(exported("written_parameter"), 1);
  PipelineOptions options = step_options();
  int losses = 0;
  options.loss = [&](const c10::IValue& output, const c10::IValue&, const Kwargs&) {
    if (++losses == 2) throw std::runtime_error("the loss is lost");
    return sum_of_means(output);
  };
  Pipeline in_stages(pipe.build(test_device), in_a_row("GPipe", 1), options);
  const Arguments batch = batch_of(pipe.program());
  EXPECT_THROW(in_stages.step(batch.args, batch.kwargs, at::Tensor()), std::exception);
  Outcome found;
  add_results_of_stages(in_stages, found);
  EXPECT_TRUE(at::equal(found.parameters.at("fading"), at::ones({4})));
}

TEST(RecomputedProgram, RefusesToShardAWrittenParameter) {
  const auto replicas = [] {
    std::vector<StagedModel> made;
    for (int i = 0; i < 2; ++i) made.push_back(pipeline(exported("written_parameter"), 1).build(test_device));
    return made;
  };
  PipelineOptions options = step_options();
  options.sharded = true;
  EXPECT_EQ(
      message_of([&] { Pipeline(replicas(), in_a_row("GPipe", 1), options); }),
      "stage 0, parameter 'fading' is written to by the stage's forward, and cannot be sharded: each replica would "
      "lose what it has written.\n  Hint: make it a buffer.");
}

TEST(RecomputedProgram, ComputesAgainAModuleWhoseInputsShareWrittenMemory) {
  const Schedule schedule = in_a_row("GPipe", 1);
  const Pipe plain_pipe = pipeline(exported("written_view"), 1);
  const Outcome expected = run_in_one_process(plain_pipe, schedule);
  const auto parts_of = [&](const std::vector<std::string>& modules) {
    const Pipe pipe = pipeline(exported("written_view"), 1);
    Program program = pipe.program();
    program.recompute(modules);
    const CountedParts counted;
    expect_same(expected, run_in_stages(pipe, schedule, inputs_of(pipe.program()), /*seed=*/0));
    EXPECT_EQ(counted.recomputed(), counted.made());
    return counted.made();
  };
  // Copies of the two inputs would not share memory, so the module runs as it is.
  EXPECT_EQ(parts_of({"inner"}), 0);
  EXPECT_EQ(parts_of({"first"}), kMicrobatches);
}

TEST(RepeatedModules, AreBlocksOfMoreThanOneOperator) {
  EXPECT_EQ(exported("blocks").repeated_modules(), (Words{"blocks.0", "blocks.1", "blocks.2", "blocks.3"}));
  // A list of linear layers.
  EXPECT_EQ(from_zoo("mlp").repeated_modules(), Words());
}

// Counts the bytes that this thread has allocated while it lives.
class AllocatedBytes final : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void* /*memory*/, std::int64_t size, std::size_t /*allocated*/, std::size_t /*reserved*/,
                         c10::Device /*device*/) override {
    current += size;
    peak = std::max(peak, current);
  }
  bool memoryProfilingEnabled() const override { return true; }

  std::int64_t current = 0;
  std::int64_t peak = 0;
};

TEST(RecomputedProgram, HasTheActivationsOfOneBlockAtATime) {
  constexpr std::int64_t kHiddenBytes = 512 * 256 * sizeof(float);
  struct Bytes {
    std::int64_t saved;
    std::int64_t peak_in_backward;
  };
  const auto measure = [](bool recomputed) {
    Program program = exported("blocks");
    program.parameters();
    if (recomputed) program.recompute(program.repeated_modules());
    const auto bytes = std::make_shared<AllocatedBytes>();
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, bytes);
    at::Tensor loss = program.run({at::ones({512, 16})}).toTensor().mean();
    Bytes result{.saved = bytes->current, .peak_in_backward = 0};
    bytes->peak = 0;
    loss.backward();
    result.peak_in_backward = bytes->peak;
    return result;
  };
  // Each block saves the input and the output of its gelu.
  const Bytes all = measure(false);
  EXPECT_GE(all.saved, 4 * 2 * kHiddenBytes);
  const Bytes of_one = measure(true);
  EXPECT_LT(of_one.saved, kHiddenBytes);
  // The activations of one block, and the gradients of these.
  EXPECT_GE(of_one.peak_in_backward, 2 * kHiddenBytes);
  EXPECT_LT(of_one.peak_in_backward, 5 * kHiddenBytes);
}

}  // namespace
}  // namespace penstock::internal::testing
