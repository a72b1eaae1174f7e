// An exported model on process ranks, on the CPU or on simulated devices: see tests/runtime/process_ranks.h. Each process
// runs these tests, all at the same time: penstock_launch 2 penstock_program_gloo_test.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "penstock/schedule/csv.h"
#include "penstock/schedule/generators.h"
#include "tests/program/piped.h"
#include "tests/program/zoo.h"
#include "tests/runtime/process_ranks.h"

namespace penstock::internal::testing {
namespace {

using ProgramGloo = ProcessRanks;

std::vector<Schedule> schedules(int ranks, int microbatches) {
  std::vector<Schedule> made;
  for (const Generator& generator : generators()) {
    Schedule schedule = generate(generator.name, {.ranks = ranks, .microbatches = microbatches});
    if (features_of(schedule).backward) made.push_back(std::move(schedule));
  }
  return made;
}

// Runs a step in the stages of this process, and expects that its host waits for no device.
Outcome run_own_stages(const Pipe& pipe, const Schedule& schedule, const TensorsByName& inputs,
                       const StageDevices& devices, PipelineOptions options) {
  const auto own = schedule.placement().stages_of(options.transport->rank() % schedule.ranks());
  Pipeline pipeline(pipe.build_stages(own, devices), schedule, options);
  const Arguments batch = arguments_from(pipe.program(), inputs);
  StepOptions everywhere;
  everywhere.results_everywhere = true;
  const std::uint64_t waits = host_waits();
  const StepResult result = pipeline.step(batch.args, batch.kwargs, at::Tensor(), everywhere);
  EXPECT_EQ(host_waits(), waits);
  Outcome outcome{.outputs = outputs_by_name({on_host(result.output)})};
  for (const at::Tensor& loss : result.losses) outcome.losses.push_back(loss.cpu());
  add_results_of_stages(pipeline, outcome);
  return outcome;
}

TEST_F(ProgramGloo, EveryScheduleGivesAGptTheResultsOfOneProcess) {
  const ZooModel model = zoo_model("gpt");
  const TensorsByName inputs = tensors_of(model.path(".inputs.safetensors"));
  for (const Schedule& schedule : schedules(ranks(), model.microbatches)) {
    SCOPED_TRACE(to_csv(schedule));
    const auto make = [&] { return pipeline(model.program(), schedule.stages()); };
    Outcome expected = run_in_one_process(make(), schedule, inputs, /*seed=*/3);
    std::erase_if(expected.gradients, [&](const auto& gradient) {
      return schedule.placement().rank_of(gradient.first.first) != world()->rank();
    });
    const Pipe pipe = make();
    PipelineOptions options = step_options(/*seed=*/3);
    options.transport = world();
    expect_same(expected, run_own_stages(pipe, schedule, inputs, test_device, options), pipe.shared_parameters());
    if (HasFailure()) return;
  }
}

// Replicas of a pipeline of two ranks, each on the same batch.
TEST_F(ProgramGloo, ReplicasAndShardsOfAGptHaveTheGradientsOfTheCpu) {
  if (!is_on_devices()) GTEST_SKIP() << "compares devices with the CPU";
  if (ranks() % 2 != 0) return;
  const ZooModel model = zoo_model("gpt");
  const TensorsByName inputs = tensors_of(model.path(".inputs.safetensors"));
  for (const Schedule& schedule : schedules(/*ranks=*/2, model.microbatches)) {
    for (const bool sharded : {false, true}) {
      SCOPED_TRACE(to_csv(schedule) + (sharded ? "sharded" : "replicated"));
      const Pipe pipe = pipeline(model.program(), schedule.stages());
      const auto run_on = [&](const StageDevices& devices) {
        PipelineOptions options = step_options();
        options.transport = world();
        options.sharded = sharded;
        return run_own_stages(pipeline(model.program(), schedule.stages()), schedule, inputs, devices, options);
      };
      const Outcome expected = run_on([](int) { return at::Device(at::kCPU); });
      ASSERT_FALSE(expected.gradients.empty());
      expect_same(expected, run_on(test_device), pipe.shared_parameters());
      if (HasFailure()) return;
    }
  }
}

}  // namespace
}  // namespace penstock::internal::testing
