// Pipelines on the simulated accelerator: the same numbers as on the CPU, no races between streams, and no host waits.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <iostream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "penstock/device/streams.h"
#include "penstock/runtime/pipeline.h"
#include "penstock/schedule/generators.h"
#include "penstock/schedule/passes.h"
#include "tests/device/simulation_main.h"
#include "tests/runtime/models.h"
#include "tests/runtime/overlap.h"

namespace penstock::internal::testing {
namespace {

at::Device sim_device(int index) {
  return {c10::kPrivateUse1, static_cast<c10::DeviceIndex>(index)};
}

struct DeviceCase {
  std::string schedule;
  int devices;
};
std::vector<DeviceCase> device_cases() {
  std::vector<DeviceCase> cases;
  for (const Generator& generator : generators()) {
    for (const int devices : {1, 2, 4}) cases.push_back({std::string(generator.name), devices});
  }
  return cases;
}

class EveryScheduleOnDevices : public ::testing::TestWithParam<DeviceCase> {
 protected:
  // Stages are dealt to the devices by their ranks.
  static StageDevices devices_of(const Schedule& schedule, int count) {
    return [&schedule, count](int stage) { return sim_device(schedule.placement().rank_of(stage) % count); };
  }
};
INSTANTIATE_TEST_SUITE_P(Threads, EveryScheduleOnDevices, ::testing::ValuesIn(device_cases()), [](const auto& one) {
  return one.param.schedule + "_" + std::to_string(one.param.devices) + "_devices";
});

TEST_P(EveryScheduleOnDevices, GivesTheLossesOutputsAndGradientsOfOneProcess) {
  for (const int ranks : {1, 2, 4}) {
    const Schedule schedule = generate(GetParam().schedule, {.ranks = ranks, .microbatches = 4});
    if (!features_of(schedule).backward) return;
    for (const NamedModel& named : kModels) {
      expect_what_one_process_gives(named, schedule, {.devices = devices_of(schedule, GetParam().devices)});
      if (HasFailure()) return;
    }
  }
}

TEST_P(EveryScheduleOnDevices, RecomputesForwards) {
  const Schedule schedule = generate(GetParam().schedule, {.ranks = 2, .microbatches = 4});
  if (!features_of(schedule).backward) return;
  for (const NamedModel& named : kModels) {
    expect_what_one_process_gives(named, add_recomputation(schedule),
                                  {.devices = devices_of(schedule, GetParam().devices)});
    if (HasFailure()) return;
  }
}

// The gradients that one step leaves in all replicas, and its losses.
std::vector<at::Tensor> results_of_step(const NamedModel& named, const Schedule& schedule, const StageDevices& devices,
                                        int replicas, bool sharded) {
  std::vector<Model> models;
  std::vector<StagedModel> staged;
  for (int i = 0; i < replicas; ++i) {
    models.push_back(named.make_on(schedule.stages(), devices));
    staged.push_back(models.back().build());
  }
  Pipeline pipeline(std::move(staged), schedule, {.loss = squared_error, .sharded = sharded});
  const std::int64_t rows_in_batch = 2 * replicas * schedule.microbatches();
  StepOptions not_reduced;
  not_reduced.reduce = false;
  const std::uint64_t waits = host_waits();
  pipeline.step({rows(rows_in_batch, "x")}, {}, rows(rows_in_batch, "y"), not_reduced);
  StepResult result = pipeline.step({rows(rows_in_batch, "z")}, {}, rows(rows_in_batch, "y"));
  EXPECT_EQ(host_waits(), waits);
  std::vector<at::Tensor> found = std::move(result.losses);
  for (int replica = 0; replica < replicas; ++replica) {
    for (const PipelineStage& stage : pipeline.stages(replica)) {
      for (const auto& [name, parameter] : stage.parameters()) found.push_back(parameter.grad());
    }
  }
  return found;
}

TEST_P(EveryScheduleOnDevices, GivesReplicasAndShardsTheGradientsThatTheyHaveOnTheCpu) {
  const Schedule schedule = generate(GetParam().schedule, {.ranks = 2, .microbatches = 4});
  if (!features_of(schedule).backward) return;
  for (const bool sharded : {false, true}) {
    for (const NamedModel& named : {kModels[0], kModels[2], kModels[3], kModels[4]}) {
      SCOPED_TRACE(std::string(named.name) + (sharded ? ", sharded" : ", replicated"));
      expect_equal(results_of_step(named, schedule, on_cpu, /*replicas=*/2, sharded),
                   results_of_step(named, schedule, devices_of(schedule, GetParam().devices), /*replicas=*/2, sharded));
      if (HasFailure()) return;
    }
  }
}

TEST_P(EveryScheduleOnDevices, NeverWaitsForADevice) {
  const Schedule schedule = generate(GetParam().schedule, {.ranks = 4, .microbatches = 8});
  if (!features_of(schedule).backward) return;
  for (const NamedModel& named : kModels) {
    SCOPED_TRACE(named.name);
    const Model model = named.make_on(schedule.stages(), devices_of(schedule, GetParam().devices));
    Pipeline pipeline(model.build(), schedule, {.loss = squared_error});
    const at::Tensor x = input_for(named, schedule.microbatches(), "x").pin_memory();
    const at::Tensor y = input_for(named, schedule.microbatches(), "y").pin_memory();
    const std::uint64_t before = sim::counters().host_waits;
    pipeline.step({x}, {}, y);
    StepResult result = pipeline.step({x}, {}, y);
    EXPECT_EQ(sim::counters().host_waits, before);
    // Only whoever wants the numbers waits.
    EXPECT_GT(result.loss(), 0);
    EXPECT_GT(sim::counters().host_waits, before);
    zero_grad(model);
  }
}

TEST_P(EveryScheduleOnDevices, GivesTheSameRandomNumbersUnderAnyCut) {
  const Schedule schedule = generate(GetParam().schedule, {.ranks = 4, .microbatches = 4});
  const NamedModel& named = kModels[1];
  const at::Tensor x = input_for(named, schedule.microbatches(), "x");
  const auto output_of = [&](const StageDevices& devices) {
    Pipeline pipeline(named.make_on(schedule.stages(), devices).build(), schedule, {});
    return pipeline.eval({x}).output.toTensor().cpu();
  };
  EXPECT_TRUE(
      at::equal(output_of([](int) { return sim_device(3); }), output_of(devices_of(schedule, GetParam().devices))));
}

// A stage that computes a product, and keeps its device busy for a while before.
constexpr std::chrono::milliseconds kBusy{5};
StageModule busy_stage(int index, at::Device device) {
  const at::Tensor w = weight(numbered("busy", index), {kWide, kWide}, device);
  return {.forward = [w](const Args& args, const Kwargs&) -> c10::IValue {
            sim::launch(current_stream(w.device()), "busy", {}, [] { std::this_thread::sleep_for(kBusy); });
            return at::matmul(tensor(args, 0), w);
          },
          .parameters = {{"w", w}}};
}

TEST(DeviceRecord, TellsWhenTheDevicesComputed) {
  const Schedule schedule = generate("1F1B", {.ranks = 2, .microbatches = 4});
  std::vector<PipelineStage> stages;
  for (int i = 0; i < 2; ++i) {
    stages.emplace_back(busy_stage(i, sim_device(i)), i, 2, StageOptions{.device = sim_device(i)});
  }
  Pipeline pipeline(std::move(stages), schedule, {.loss = squared_error});
  pipeline.step({rows(8, "x")}, {}, rows(8, "y"));
  const Record& record = pipeline.record();
  const auto busy = std::chrono::nanoseconds(kBusy).count();
  for (int rank = 0; rank < 2; ++rank) {
    const auto actions = pipeline.recorded_schedule().actions(rank);
    std::int64_t end_of_last = 0;
    for (std::size_t i = 0; i < actions.size(); ++i) {
      const ActionRecord& found = record[static_cast<std::size_t>(rank)][i];
      SCOPED_TRACE(to_string(actions[i]) + " of rank " + std::to_string(rank));
      EXPECT_LE(found.start, found.end);
      if (is_forward(actions[i])) {
        EXPECT_GE(found.end - found.start - found.waited, busy);
      }
      // A message begins when it has been computed, whatever was copied to the device meanwhile.
      const bool is_send =
          actions[i].computation == Computation::SendForward || actions[i].computation == Computation::SendBackward;
      if (is_send) {
        EXPECT_GE(found.start, end_of_last);
      }
      if (!actions[i].is_compute()) continue;
      EXPECT_GE(found.start, end_of_last);
      EXPECT_LE(found.waited, found.end - found.start);
      end_of_last = found.end;
    }
  }
  // The second stage begins when its first activation has been computed.
  const ActionRecord* first = nullptr;
  const auto actions = pipeline.recorded_schedule().actions(1);
  for (std::size_t i = 0; i < actions.size() && first == nullptr; ++i) {
    if (is_forward(actions[i])) first = &record[1][i];
  }
  ASSERT_NE(first, nullptr);
  EXPECT_GE(first->start + first->waited, busy);
}

// Thread ranks copy what they receive from another device, in streams of the device that it lies on.
TEST(DeviceRecord, TellsWhenMessagesWereCopied) {
  const Schedule schedule = generate("1F1B", {.ranks = 2, .microbatches = 4});
  std::vector<PipelineStage> stages;
  for (int i = 0; i < 2; ++i) {
    stages.emplace_back(busy_stage(i, sim_device(i)), i, 2, StageOptions{.device = sim_device(i)});
  }
  Pipeline pipeline(std::move(stages), schedule, {.loss = squared_error});
  for (int step = 0; step < 2; ++step) pipeline.step({rows(8, "x")}, {}, rows(8, "y"));
  const Record& record = pipeline.record();
  const Schedule& recorded = pipeline.recorded_schedule();
  const auto end_of = [&](int rank, const Action& action) {
    const auto actions = recorded.actions(rank);
    const auto found = std::ranges::find(actions, action);
    return record[static_cast<std::size_t>(rank)].at(static_cast<std::size_t>(found - actions.begin())).end;
  };
  int received = 0;
  for (int rank = 0; rank < 2; ++rank) {
    const auto actions = recorded.actions(rank);
    for (std::size_t i = 0; i < actions.size(); ++i) {
      const ActionRecord& found = record[static_cast<std::size_t>(rank)][i];
      SCOPED_TRACE(to_string(actions[i]) + " of rank " + std::to_string(rank));
      EXPECT_EQ(found.has_transfer(), actions[i].is_recv());
      if (!found.has_transfer()) continue;
      ++received;
      EXPECT_EQ(found.peer, 1 - rank);
      EXPECT_EQ(found.bytes, 2 * kWide * 4);
      EXPECT_LE(found.transfer_start, found.transfer_end);
      const Computation produced = actions[i].carries_activation() ? Computation::Forward : Computation::FullBackward;
      EXPECT_GE(found.transfer_start, end_of(1 - rank, compute(1 - rank, produced, actions[i].microbatch)));
    }
  }
  EXPECT_EQ(received, 8);
  EXPECT_EQ(timeline_of(recorded, record).ranks[0].transfers.size(), 4U);
}

TEST(DeviceRecord, ShowsACopyBesideAComputation) {
  const OverlappedTransfer overlapped;
  std::vector<PipelineStage> stages;
  stages.emplace_back(overlapped.first(sim_device(0)), 0, 2, StageOptions{.device = sim_device(0)});
  stages.emplace_back(overlapped.second(sim_device(1)), 1, 2, StageOptions{.device = sim_device(1)});
  Pipeline pipeline(std::move(stages), gpipe(/*ranks=*/2, /*microbatches=*/2), {.loss = squared_error});
  pipeline.step({overlapped.input()}, {}, at::zeros({OverlappedTransfer::kRows, kWide}));
  const Record record = pipeline.record();
  overlapped.expect_overlap(pipeline.recorded_schedule(), record[1]);
}

TEST(DeviceRecord, HasNoTransfersOnOneDeviceAndOnTheCpu) {
  for (const at::Device device : {sim_device(0), at::Device(at::kCPU)}) {
    const Model model = perceptron(2, [&](int) { return device; });
    Pipeline pipeline(model.build(), gpipe(/*ranks=*/2, /*microbatches=*/2), {.loss = squared_error});
    pipeline.step({rows(4, "x")}, {}, rows(4, "y"));
    for (const auto& rank : pipeline.record()) {
      EXPECT_TRUE(std::ranges::none_of(rank, &ActionRecord::has_transfer)) << device;
    }
  }
}

TEST(DeviceStep, ComesAfterWhatTheCallerHasStartedAndBeforeWhatItStartsNext) {
  const Schedule schedule = generate("1F1B", {.ranks = 2, .microbatches = 2});
  const auto devices = [](int stage) { return sim_device(stage); };
  const Model model = perceptron(2, devices);
  const Model expected_model = perceptron(2);
  Pipeline pipeline(model.build(), schedule, {.loss = squared_error});
  Pipeline expected(expected_model.build(), schedule, {.loss = squared_error});
  const c10::AutoGradMode no_grad(false);
  for (int step = 0; step < 3; ++step) {
    const auto train = [&](Pipeline& trained, const Model& weights, at::Device device) {
      // The input is still being computed when the step begins, and so are the weights.
      const at::Tensor x = rows(4, "x").to(device) * (step + 1);
      StepResult result;
      {
        const c10::AutoGradMode grad(true);
        result = trained.step({x}, {}, rows(4, "y"));
      }
      for (const StageModule& stage : weights.stages) {
        for (const auto& [name, parameter] : stage.parameters) {
          parameter.data().sub_(parameter.grad(), /*alpha=*/0.1);
          parameter.mutable_grad().reset();
        }
      }
      return result.output.toTensor() * 2;
    };
    EXPECT_TRUE(same_tensor(train(expected, expected_model, at::kCPU), train(pipeline, model, sim_device(0)))) << step;
  }
}

TEST(DeviceStep, RunsRanksWithStagesOnSeveralDevices) {
  const auto devices = [](int stage) { return sim_device(stage); };
  const Schedule schedule = generate("Interleaved1F1B", {.ranks = 2, .microbatches = 4});
  ASSERT_EQ(schedule.stages(), 4);
  for (const NamedModel& named : {kModels[0], kModels[2], kModels[3], kModels[4], kModels[5]}) {
    expect_what_one_process_gives(named, schedule, {.devices = devices});
    for (const bool sharded : {false, true}) {
      if (std::string(named.name) == "shared_across") continue;
      expect_equal(results_of_step(named, schedule, on_cpu, /*replicas=*/2, sharded),
                   results_of_step(named, schedule, devices, /*replicas=*/2, sharded));
    }
  }
}

TEST(DeviceStep, LeavesItsArgumentsToTheCaller) {
  const Schedule schedule = generate("GPipe", {.ranks = 2, .microbatches = 8});
  const Model model = perceptron(2, [](int stage) { return sim_device(stage); });
  Pipeline pipeline(model.build(), schedule, {.loss = squared_error});
  const at::Tensor x = rows(16, "x").pin_memory();
  const at::Tensor y = rows(16, "y").pin_memory();
  pipeline.step({x}, {}, y);
  // The simulation ends the process at a write into memory that is being copied.
  x.zero_();
  y.zero_();
}

TEST(DeviceStep, TakesArgumentsFromAnyDeviceAndStream) {
  const Schedule schedule = generate("1F1B", {.ranks = 2, .microbatches = 4});
  const auto output_of = [&](const StageDevices& devices, at::Device device) {
    const Model model = perceptron(2, devices);
    Pipeline pipeline(model.build(), schedule, {.loss = squared_error});
    const at::Tensor x = (rows(8, "x").to(device) * 2).requires_grad_();
    const at::Tensor y = rows(8, "y").to(device) * 3;
    at::Tensor output = pipeline.step({x}, {}, y).output.toTensor();
    return std::vector<at::Tensor>{output, x.grad() * 2};
  };
  const auto expected = output_of(on_cpu, at::kCPU);
  const auto on_devices = [](int stage) { return sim_device(stage); };
  expect_equal(expected, output_of(on_devices, sim_device(3)));
  const c10::StreamGuard stream(stream_of_pool(sim_device(3)));
  expect_equal(expected, output_of(on_devices, sim_device(3)));
  const c10::StreamGuard other_stream(stream_of_pool(sim_device(1)));
  expect_equal(expected, output_of(on_devices, sim_device(1)));
}

TEST(DeviceStep, AccumulatesShardsWithoutWaitingForADevice) {
  const Schedule schedule = generate("1F1B", {.ranks = 2, .microbatches = 2});
  std::vector<Model> models;
  std::vector<StagedModel> replicas;
  for (int i = 0; i < 2; ++i) {
    models.push_back(perceptron(2, [](int stage) { return sim_device(stage); }));
    replicas.push_back(models.back().build());
  }
  Pipeline pipeline(std::move(replicas), schedule, {.loss = squared_error, .sharded = true});
  StepOptions not_reduced;
  not_reduced.reduce = false;
  const std::uint64_t before = sim::counters().host_waits;
  for (int step = 0; step < 3; ++step) pipeline.step({rows(8, "x")}, {}, rows(8, "y"), not_reduced);
  pipeline.step({rows(8, "x")}, {}, rows(8, "y"));
  EXPECT_EQ(sim::counters().host_waits, before);
}

TEST(DeviceStep, EndsWhenADeviceDoesNot) {
  const Schedule schedule = generate("GPipe", {.ranks = 1, .microbatches = 32});
  // Kernels may still run when the test has ended.
  const auto released = std::make_shared<std::atomic<bool>>(false);
  const at::Tensor w = weight("w", {kWide, kWide}, sim_device(0));
  std::vector<PipelineStage> stages;
  stages.emplace_back(StageModule{.forward = [&](const Args& args, const Kwargs&) -> c10::IValue {
                                    sim::launch(current_stream(w.device()), "hang", {}, [released] {
                                      while (!*released) std::this_thread::sleep_for(std::chrono::milliseconds(1));
                                    });
                                    return at::matmul(tensor(args, 0), w);
                                  },
                                  .parameters = {{"w", w}}},
                      0, 1, StageOptions{.device = sim_device(0)});
  Pipeline pipeline(std::move(stages), schedule, {.loss = squared_error, .timeout = std::chrono::milliseconds(200)});
  try {
    pipeline.step({rows(64, "x")}, {}, rows(64, "y"));
    FAIL() << "the step has ended";
  } catch (const PipelineError& error) {
    EXPECT_NE(std::string(error.what()).find("the device has not finished 0F0 within the deadline"), std::string::npos)
        << error.what();
  }
  *released = true;
}

TEST(DeviceStep, MovesGradientsOfTheBatchBackToTheCpu) {
  const Schedule schedule = generate("GPipe", {.ranks = 2, .microbatches = 2});
  const auto gradient_on = [&](const StageDevices& devices) {
    const Model model = perceptron(2, devices);
    Pipeline pipeline(model.build(), schedule, {.loss = squared_error});
    const at::Tensor x = rows(4, "x").requires_grad_();
    pipeline.step({x}, {}, rows(4, "y"));
    EXPECT_TRUE(x.grad().is_cpu());
    return x.grad();
  };
  EXPECT_TRUE(same_tensor(gradient_on(on_cpu), gradient_on([](int stage) { return sim_device(stage); })));
}

TEST(DeviceStep, RefusesParametersOnAnotherDevice) {
  const Schedule schedule = generate("GPipe", {.ranks = 2, .microbatches = 2});
  Model model = perceptron(2, on_cpu);
  model.devices = [](int stage) { return sim_device(stage); };
  try {
    const Pipeline pipeline(model.build(), schedule, {.loss = squared_error});
    FAIL() << "it was accepted";
  } catch (const PipelineError& error) {
    EXPECT_STREQ(error.what(),
                 "stage 0, parameter 'w' is on cpu, and the stage computes on sim:0.\n"
                 "  Hint: set StageOptions::device, or move the module to that device.");
  }
}

TEST(DeviceStep, RollsBackWhatAFailedStepHasChanged) {
  const Schedule schedule = generate("1F1B", {.ranks = 2, .microbatches = 4});
  Model model = perceptron(2, [](int stage) { return sim_device(stage); });
  bool fails = false;
  const auto forward = model.stages[1].forward;
  int calls = 0;
  model.stages[1].forward = [&](const Args& args, const Kwargs& kwargs) -> c10::IValue {
    if (fails && ++calls == 3) throw std::runtime_error("the third forward fails");
    return forward(args, kwargs);
  };
  Pipeline pipeline(model.build(), schedule, {.loss = squared_error});
  pipeline.step({rows(8, "x")}, {}, rows(8, "y"));
  const std::vector<at::Tensor> before = clones(gradients_of(model));
  fails = true;
  EXPECT_THROW(pipeline.step({rows(8, "z")}, {}, rows(8, "y")), PipelineError);
  expect_equal(before, gradients_of(model));
  fails = false;
  pipeline.step({rows(8, "z")}, {}, rows(8, "y"));
  EXPECT_FALSE(same_tensor(before.front(), gradients_of(model).front()));
}

}  // namespace

void begin_on_simulation() {}

}  // namespace penstock::internal::testing
