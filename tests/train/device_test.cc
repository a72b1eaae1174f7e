// Training on the simulated accelerator: the losses and files of the CPU, no races between streams, and one wait of the
// host in a step.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "penstock/base/deadline.h"
#include "penstock/device/device_list.h"
#include "penstock/device/host_copies.h"
#include "penstock/device/streams.h"
#include "penstock/schedule/generators.h"
#include "penstock/train/generate_text.h"
#include "penstock/train/trainer.h"
#include "tests/device/simulation_main.h"
#include "tests/tensor/folder.h"
#include "tests/tensor/values.h"
#include "tests/thrown.h"

namespace penstock::internal::testing {
namespace {

namespace fs = std::filesystem;

struct Case {
  std::string devices = "sim:0";
  std::string schedule = "1F1B";
  int ranks = 2;
  int stages_per_rank = 1;
  int replicas = 1;
  bool sharded = false;
  std::string optimizer = "adamw";
  int accumulate = 1;
  double dropout = 0;
  std::optional<at::ScalarType> autocast = std::nullopt;
  std::optional<GradScalerOptions> grad_scaler = std::nullopt;
};

constexpr int kSteps = 4;

const AdditionData& sums() {
  static const AdditionData data(/*digits=*/1, /*rows=*/8, /*seed=*/5);
  return data;
}

std::unique_ptr<Trainer> trainer_of(const Case& setup) {
  const Schedule schedule =
      generate(setup.schedule,
               {.ranks = setup.ranks, .stages_per_rank = setup.stages_per_rank, .microbatches = 4 / setup.replicas});
  const GptOptions gpt{.layers = 4,
                       .width = 16,
                       .heads = 2,
                       .length = sums().length(),
                       .dropout = setup.dropout,
                       .autocast = setup.autocast};
  std::vector<std::unique_ptr<Model>> replicas;
  for (int i = 0; i < setup.replicas; ++i) replicas.push_back(gpt_model(gpt, /*seed=*/5, schedule.stages()));
  TrainerOptions options;
  options.devices = parse_devices(setup.devices).complete();
  options.steps = 10;
  options.optimizer.name = setup.optimizer;
  options.learning_rate.warmup = 2;
  options.accumulate = setup.accumulate;
  // All steps are clipped.
  options.clip = 0.5;
  options.grad_scaler = setup.grad_scaler;
  options.sharded = setup.sharded;
  options.seed = 5;
  options.timeout = std::chrono::seconds(60);
  return std::make_unique<Trainer>(std::move(replicas), sums(), schedule, std::move(options));
}

std::vector<double> losses_of(Trainer& trainer, int steps = kSteps) {
  std::vector<double> losses;
  for (int i = 0; i < steps; ++i) losses.push_back(trainer.step().loss);
  return losses;
}
std::vector<double> losses_of(const Case& setup) {
  return losses_of(*trainer_of(setup));
}
std::vector<double> losses_on_cpu(Case setup) {
  setup.devices = "cpu";
  return losses_of(setup);
}

std::string bytes_of(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

TEST(DeviceTraining, HasTheLossesOfTheCpu) {
  for (const Case& setup :
       {Case{.ranks = 1}, Case{}, Case{.devices = "sim:0,1"}, Case{.devices = "sim", .ranks = 3},
        Case{.devices = "sim:2,0", .schedule = "Interleaved1F1B", .stages_per_rank = 2},
        Case{.devices = "sim:0,1", .schedule = "ZBVZeroBubble", .stages_per_rank = 2},
        Case{.devices = "sim:0,1", .schedule = "GPipe"}, Case{.devices = "sim:0,1", .optimizer = "sgd"},
        Case{.devices = "sim:0,1", .optimizer = "adam"}, Case{.devices = "sim:0,1", .accumulate = 2}}) {
    SCOPED_TRACE(setup.devices + ", " + setup.schedule + ", " + setup.optimizer);
    EXPECT_EQ(losses_of(setup), losses_on_cpu(setup));
  }
}

TEST(DeviceTraining, HasTheLossesOfTheCpuWithReplicasAndShards) {
  for (const bool sharded : {false, true}) {
    for (const char* const devices : {"sim:0", "sim:0,1", "sim"}) {
      SCOPED_TRACE(std::string(devices) + (sharded ? ", sharded" : ""));
      const Case setup{.devices = devices, .replicas = 2, .sharded = sharded};
      EXPECT_EQ(losses_of(setup), losses_on_cpu(setup));
    }
  }
}

TEST(DeviceTraining, DrawsTheSameDropoutOnAnyNumberOfDevices) {
  const std::vector<double> losses = losses_of({.ranks = 1, .dropout = 0.2});
  EXPECT_EQ(losses_of({.devices = "sim:0,1", .dropout = 0.2}), losses);
  EXPECT_EQ(losses_of({.devices = "sim:3,1,2", .ranks = 3, .dropout = 0.2}), losses);
  EXPECT_NE(losses_of({.dropout = 0}), losses);
}

TEST(DeviceTraining, WaitsOnceInAStep) {
  for (const Case& setup : {Case{.devices = "sim:0,1"}, Case{.devices = "sim:0,1", .accumulate = 2},
                            Case{.devices = "sim:0,1", .optimizer = "sgd"}}) {
    const auto trainer = trainer_of(setup);
    losses_of(*trainer, 2);
    const std::uint64_t before = sim::counters().host_waits;
    losses_of(*trainer, 6);
    // The wait for losses and norms is a wait for an event with a deadline, which the counter leaves out. It counts what
    // comes unasked, such as item() and copies from memory that is not pinned. The clock of each device may be set once.
    EXPECT_LE(sim::counters().host_waits - before, 2U);
  }
}

TEST(DeviceTraining, WritesTheCheckpointOfTheCpuAndLoadsItOnEither) {
  for (const bool sharded : {false, true}) {
    const auto on = [&](const char* devices) {
      return trainer_of({.devices = devices, .replicas = sharded ? 2 : 1, .sharded = sharded});
    };
    const auto cpu = on("cpu");
    const std::vector<double> losses = losses_of(*cpu, kSteps);
    const Folder folder;
    std::vector<std::string> saved;
    for (const char* const devices : {"cpu", "sim:0,1"}) {
      const auto trainer = on(devices);
      losses_of(*trainer, 2);
      saved.push_back(trainer->save(folder / devices, /*keep=*/1, "{}"));
    }
    for (const char* const name : {"weights-0", "weights-1", "optimizer-0", "optimizer-1"}) {
      const std::string file = std::string(name) + ".safetensors";
      ASSERT_GT(bytes_of(fs::path(saved[0]) / file).size(), 100U) << file;
      EXPECT_TRUE(bytes_of(fs::path(saved[0]) / file) == bytes_of(fs::path(saved[1]) / file)) << file;
    }
    for (const auto& [from, devices] : {std::pair(saved[0], "sim:0,1"), std::pair(saved[1], "cpu")}) {
      const auto trainer = on(devices);
      trainer->load(Checkpoint(from));
      EXPECT_EQ(losses_of(*trainer, 2), (std::vector<double>{losses[2], losses[3]})) << devices;
    }
  }
}

TEST(DeviceTraining, EvaluatesWithTheLossAndOutputsOfTheCpu) {
  const std::vector<Batch> held_out = sums().held_out();
  const std::vector<Batch> batches{held_out[0], held_out[1]};
  const auto evaluation_on = [&](const char* devices) {
    const auto trainer = trainer_of({.devices = devices});
    losses_of(*trainer, 2);
    return trainer->evaluate(batches, /*return_outputs=*/true);
  };
  const Trainer::Evaluation expected = evaluation_on("cpu");
  const Trainer::Evaluation found = evaluation_on("sim:0,1");
  EXPECT_EQ(found.loss, expected.loss);
  EXPECT_EQ(found.weight, expected.weight);
  ASSERT_EQ(found.outputs.size(), 2U);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_TRUE(found.outputs[i].toTensor().is_cpu());
    EXPECT_TRUE(at::equal(found.outputs[i].toTensor(), expected.outputs[i].toTensor()));
  }
}

TEST(DeviceTraining, GeneratesTheTextOfTheCpu) {
  const auto text_on = [](const char* devices) {
    const auto trainer = trainer_of({.devices = devices});
    losses_of(*trainer, 2);
    return generate_text(trainer->generation_pipeline(), sums().length(), "1+", {.bytes = 8, .seed = 3});
  };
  EXPECT_EQ(text_on("sim:0,1"), text_on("cpu"));
}

TEST(DeviceTraining, CountsTheMemoryOfDevicesAndPredictsNone) {
  const auto trainer = trainer_of({.devices = "sim:0,1"});
  const StepReport report = trainer->step();
  const std::vector<RankMemory> memory = trainer->memory();
  ASSERT_EQ(memory.size(), 2U);
  std::int64_t parameters = 0;
  for (const auto& [name, parameter] : trainer->pipeline().stages()[0].parameters()) {
    parameters += static_cast<std::int64_t>(parameter.nbytes());
  }
  for (std::size_t rank = 0; rank < 2; ++rank) {
    EXPECT_GT(report.memory[rank], parameters / 2) << rank;
    EXPECT_GE(memory[rank].measured, report.memory[rank]) << rank;
    EXPECT_EQ(memory[rank].predicted, 0) << rank;
  }
  const std::vector<Record> records = trainer->records();
  for (const ActionRecord& action : records.back()[0]) {
    EXPECT_GT(action.allocated, parameters);
    EXPECT_GE(action.peak_allocated, action.allocated);
  }
}

TEST(DeviceTraining, FindsTheLossScaleOfFloat16OnAllRanks) {
  const auto on = [](const char* devices, int ranks) {
    return trainer_of({.devices = devices,
                       .ranks = ranks,
                       .autocast = at::kHalf,
                       .grad_scaler = GradScalerOptions{.initial_scale = 0x1p30, .growth_interval = 4}});
  };
  const auto alone = on("sim:0", 1);
  const auto trainer = on("sim:0,1", 2);
  int skipped = 0;
  StepReport report;
  for (int step = 0; step < 24; ++step) {
    const StepReport expected = alone->step();
    report = trainer->step();
    EXPECT_EQ(report.loss, expected.loss) << step;
    EXPECT_EQ(report.loss_scale, expected.loss_scale) << step;
    EXPECT_EQ(report.skipped, expected.skipped) << step;
    if (report.skipped.empty()) continue;
    ++skipped;
    EXPECT_NE(report.skipped.find("the gradients overflow float16 at a loss scale of "), std::string::npos);
  }
  EXPECT_GT(skipped, 3);
  EXPECT_LT(skipped, 20);
  EXPECT_LT(*report.loss_scale, 0x1p30);

  const Folder folder;
  const std::string saved = trainer->save(folder / "half", /*keep=*/1, "{}");
  const auto resumed = on("sim:1", 2);
  resumed->load(Checkpoint(saved));
  for (int step = 0; step < 3; ++step) {
    const StepReport expected = trainer->step();
    const StepReport found = resumed->step();
    EXPECT_EQ(found.loss, expected.loss);
    EXPECT_EQ(found.loss_scale, expected.loss_scale);
  }
}

TEST(DeviceTraining, TrainsInBfloat16) {
  const std::vector<double> losses = losses_of({.devices = "sim:0,1", .autocast = at::kBFloat16});
  EXPECT_EQ(losses, losses_of({.ranks = 1, .autocast = at::kBFloat16}));
  EXPECT_NE(losses, losses_of({}));
  EXPECT_NEAR(losses.back(), losses_of({}).back(), 0.05);
}

TEST(HostCopies, ReadsTensorsOfSeveralDevicesAfterOneWait) {
  const at::Tensor first = at::arange(6, at::Device(at::kPrivateUse1, 0)) * 2;
  const at::Tensor second = at::arange(4, at::Device(at::kPrivateUse1, 1)) + 1;
  const at::Tensor on_host = at::ones({2});
  const std::uint64_t before = sim::counters().host_waits;
  HostCopies copies;
  const at::Tensor first_copy = copies.start(first);
  const at::Tensor second_copy = copies.start(second);
  EXPECT_TRUE(copies.start(on_host).is_same(on_host));
  ASSERT_TRUE(copies.wait(deadline_after(std::chrono::seconds(60))));
  EXPECT_EQ(sim::counters().host_waits, before);
  EXPECT_TRUE(first_copy.is_pinned());
  EXPECT_TRUE(at::equal(first_copy, at::arange(6) * 2));
  EXPECT_TRUE(at::equal(second_copy, at::arange(4) + 1));
}

TEST(HostCopies, ReturnsAtTheDeadlineOfABusyDevice) {
  const at::Device device(at::kPrivateUse1, 2);
  const at::Tensor tensor = at::ones({3}, device);
  std::atomic<bool> is_released = false;
  sim::launch(current_stream(device), "busy", {}, [&] { is_released.wait(false); });
  HostCopies copies;
  const at::Tensor copy = copies.start(tensor);
  EXPECT_FALSE(copies.wait(deadline_after(std::chrono::milliseconds(5))));
  is_released = true;
  is_released.notify_all();
  ASSERT_TRUE(copies.wait(deadline_after(std::chrono::seconds(60))));
  EXPECT_TRUE(at::equal(copy, at::ones({3})));
}

TEST(Pinned, CopiesHostTensorsOnce) {
  const at::Tensor tensor = at::ones({3});
  const at::Tensor copy = pinned(tensor);
  EXPECT_TRUE(copy.is_pinned());
  EXPECT_TRUE(at::equal(copy, tensor));
  EXPECT_TRUE(pinned(copy).is_same(copy));
  EXPECT_FALSE(pinned(at::Tensor()).defined());
}

TEST(DeviceList, NamesTheDevicesThatThereAre) {
  EXPECT_EQ(parse_devices("sim").complete().text(), "sim:0,1,2,3");
  EXPECT_EQ(message_of<DeviceError>([] { parse_devices("sim:0,5").complete(); }),
            "there are 4 devices of type sim, numbered from 0; found sim:5.");
  EXPECT_EQ(
      message_of<DeviceError>([] { parse_devices("cuda:1").complete(); }),
      "this build of libtorch does not support cuda devices.\n  Hint: install a build of torch for cuda and add its "
      "directory torch/lib to LD_LIBRARY_PATH, or use the CPU.");
}

}  // namespace

void begin_on_simulation() {}

}  // namespace penstock::internal::testing
