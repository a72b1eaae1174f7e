// Checkpoints of stages on the simulated accelerator, which are copied and written beside the steps that follow.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "penstock/base/deadline.h"
#include "penstock/device/streams.h"
#include "penstock/train/checkpoint.h"
#include "penstock/train/loop.h"
#include "tests/device/simulation_main.h"
#include "tests/tensor/folder.h"
#include "tests/thrown.h"
#include "tests/train/running_mean.h"

namespace penstock::internal::testing {
namespace {

namespace fs = std::filesystem;

constexpr std::chrono::seconds kDeadline{60};

std::vector<double> losses_of(Trainer& trainer, int steps) {
  std::vector<double> losses;
  for (int i = 0; i < steps; ++i) losses.push_back(trainer.step().loss);
  return losses;
}

std::string bytes_of(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void expect_same_files(const std::string& expected, const std::string& found) {
  for (const char* const name : {"weights-0", "weights-1", "optimizer-0", "optimizer-1"}) {
    const std::string file = std::string(name) + ".safetensors";
    ASSERT_GT(bytes_of(fs::path(expected) / file).size(), 100U) << file;
    EXPECT_TRUE(bytes_of(fs::path(expected) / file) == bytes_of(fs::path(found) / file)) << file;
  }
}

// Runs a step and advances the checkpoint until it is on disk.
SavedCheckpoint train_until_saved(Trainer& trainer) {
  const Deadline deadline = deadline_after(kDeadline);
  while (Clock::now() < deadline) {
    trainer.step();
    if (const std::optional<SavedCheckpoint> saved = trainer.poll_save()) return *saved;
  }
  throw std::runtime_error("the checkpoint is not on disk");
}

void break_a_parameter(Trainer& trainer) {
  const c10::NoGradGuard no_grad;
  trainer.pipeline().stages()[1].parameters()[0].second.fill_(std::numeric_limits<float>::infinity());
}

constexpr const char* kNotFinite =
    ": is not written, because parameter weight1 of stage 1 is not finite; earlier checkpoints remain.\n"
    "  Hint: lower the learning rate or lower the clipping norm, and resume from the last of them.";

TEST(DeviceCheckpoints, HoldTheStateBeforeTheStepsBesideThem) {
  for (const MeanCase& setup : {MeanCase{}, MeanCase{.devices = "sim:2"}, MeanCase{.optimizer = "sgd"},
                                MeanCase{.sharded = true}, MeanCase{.devices = "sim", .sharded = true}}) {
    SCOPED_TRACE(setup.devices + ", " + setup.optimizer + (setup.sharded ? ", sharded" : ""));
    const Folder folder;
    MeanCase on_cpu = setup;
    on_cpu.devices = "cpu";
    const auto expected = mean_trainer(on_cpu);
    losses_of(*expected, 2);
    const std::string expected_path = expected->save(folder / "cpu", /*keep=*/1, "{}");
    const std::vector<double> expected_losses = losses_of(*expected, 3);

    const auto trainer = mean_trainer(setup);
    losses_of(*trainer, 2);
    trainer->start_save(folder / "beside", /*keep=*/1, "{}");
    // The first step runs beside the copies, the second beside the writing.
    std::vector<double> losses = losses_of(*trainer, 1);
    EXPECT_FALSE(trainer->poll_save());
    losses.push_back(trainer->step().loss);
    const std::optional<SavedCheckpoint> saved = trainer->finish_save();
    losses.push_back(trainer->step().loss);
    ASSERT_TRUE(saved);
    EXPECT_EQ(saved->step, 2);
    EXPECT_EQ(saved->path, folder / "beside/step-00000002");
    expect_same_files(expected_path, saved->path);
    EXPECT_EQ(losses, expected_losses);

    // Each replica has buffers of its own, and a checkpoint those of the first.
    if (setup.sharded) continue;
    const auto resumed = mean_trainer(setup);
    resumed->load(Checkpoint(saved->path));
    EXPECT_EQ(losses_of(*resumed, 3), expected_losses);
  }
}

TEST(DeviceCheckpoints, HoldTheBuffersBeforeAnEvaluationBesideThem) {
  const MeanRows data;
  const Folder folder;
  const auto trainer = mean_trainer({});
  losses_of(*trainer, 2);
  const std::string expected = trainer->save(folder / "before", /*keep=*/1, "{}");
  trainer->start_save(folder / "beside", /*keep=*/1, "{}");
  trainer->evaluate({data.batch(7)});
  expect_same_files(expected, trainer->finish_save()->path);
}

TEST(DeviceCheckpoints, AppearWhenTheyAreComplete) {
  const Folder folder;
  const auto trainer = mean_trainer({});
  losses_of(*trainer, 1);
  trainer->start_save(folder / "kept", /*keep=*/1, "{}");
  trainer->step();
  EXPECT_FALSE(fs::exists(folder / "kept"));
  EXPECT_FALSE(trainer->poll_save());
  EXPECT_FALSE(fs::exists(folder / "kept/step-00000001"));
  EXPECT_EQ(train_until_saved(*trainer).path, folder / "kept/step-00000001");
  EXPECT_EQ(Checkpoint(folder / "kept").info().step, 1);
  EXPECT_FALSE(trainer->poll_save());
  EXPECT_FALSE(trainer->finish_save());
}

TEST(DeviceCheckpoints, AreBegunWithoutAWaitForTheDevice) {
  const Folder folder;
  const auto trainer = mean_trainer({});
  losses_of(*trainer, 1);
  const at::Device device = trainer->pipeline().stages()[0].device();
  std::atomic<bool> is_released = false;
  std::atomic<bool> is_late = false;
  sim::launch(current_stream(device), "busy", {}, [&] {
    const Deadline deadline = deadline_after(kDeadline);
    while (!is_released) {
      if (Clock::now() > deadline) {
        is_late = true;
        return;
      }
      std::this_thread::yield();
    }
  });
  const std::uint64_t before = sim::counters().host_waits;
  trainer->start_save(folder / "kept", /*keep=*/1, "{}");
  EXPECT_EQ(sim::counters().host_waits, before);
  EXPECT_FALSE(is_late) << "the host has waited for the device";
  is_released = true;
  EXPECT_EQ(trainer->finish_save()->step, 1);
}

TEST(DeviceCheckpoints, ReportParametersThatAreNotFinite) {
  const Folder folder;
  const auto trainer = mean_trainer({});
  losses_of(*trainer, 1);
  trainer->save(folder / "kept", /*keep=*/1, "{}");
  trainer->step();
  break_a_parameter(*trainer);
  trainer->start_save(folder / "kept", /*keep=*/1, "{}");
  EXPECT_EQ(message_of<CheckpointError>([&] { trainer->finish_save(); }),
            folder / "kept/step-00000002" + std::string(kNotFinite));
  EXPECT_FALSE(trainer->finish_save());
  EXPECT_EQ(Checkpoint(folder / "kept").info().step, 1);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder / "kept"), fs::directory_iterator()), 1);
}

TEST(DeviceCheckpoints, ReportADirectoryThatCannotBeWritten) {
  const Folder folder;
  folder.write("file", "x");
  const auto trainer = mean_trainer({});
  losses_of(*trainer, 1);
  trainer->start_save(folder / "file/kept", /*keep=*/1, "{}");
  trainer->step();
  const std::string message = message_of<CheckpointError>([&] { trainer->poll_save(); });
  EXPECT_NE(message.find("Not a directory"), std::string::npos) << message;
  // The trainer can go on.
  trainer->step();
  EXPECT_EQ(Checkpoint(trainer->save(folder / "kept", /*keep=*/1, "{}")).info().step, 3);
}

TEST(DeviceTrainingLoop, SavesEachCheckpointBeforeTheNextOneAndTheLastBeforeItReturns) {
  const Folder folder;
  const auto trainer = mean_trainer({});
  std::vector<std::int64_t> saved;
  LoopEvents events;
  events.saved = [&](std::int64_t step, const std::string& path) {
    EXPECT_EQ(Checkpoint(path).info().step, step);
    // No later checkpoint has begun but the one that waits for this.
    EXPECT_LE(trainer->steps_done(), step + 2);
    saved.push_back(step);
  };
  const LoopOptions options{.checkpoint = folder / "kept", .checkpoint_every = 2, .keep = 2};
  EXPECT_EQ(train(*trainer, 7, {}, options, events), 0);
  EXPECT_EQ(saved, (std::vector<std::int64_t>{2, 4, 6, 7}));
  EXPECT_TRUE(fs::exists(folder / "kept/step-00000006"));
  EXPECT_EQ(std::distance(fs::directory_iterator(folder / "kept"), fs::directory_iterator()), 2);
}

TEST(DeviceTrainingLoop, SavesACompleteCheckpointWhenItIsStopped) {
  const Folder folder;
  const auto trainer = mean_trainer({});
  std::vector<std::int64_t> saved;
  LoopEvents events;
  events.stop_code = [&] { return trainer->steps_done() == 4 ? 143 : 0; };
  events.saved = [&](std::int64_t step, const std::string&) { saved.push_back(step); };
  EXPECT_EQ(train(*trainer, 20, {}, {.checkpoint = folder / "kept", .checkpoint_every = 4, .keep = 3}, events), 143);
  EXPECT_EQ(saved, (std::vector<std::int64_t>{4, 5}));
  EXPECT_EQ(Checkpoint(folder / "kept").info().step, 5);
}

TEST(DeviceTrainingLoop, CompletesTheCheckpointInFlightWhenAStepFails) {
  const Folder folder;
  const auto expected = mean_trainer({.devices = "cpu"});
  losses_of(*expected, 2);
  const std::string expected_path = expected->save(folder / "cpu", /*keep=*/1, "{}");
  const auto trainer = mean_trainer({});
  std::vector<std::int64_t> saved;
  LoopEvents events;
  events.stepped = [&](const StepReport& report) {
    if (report.step == 3) throw std::runtime_error("the metrics cannot be written");
  };
  events.saved = [&](std::int64_t step, const std::string&) { saved.push_back(step); };
  const LoopOptions options{.checkpoint = folder / "kept", .checkpoint_every = 2, .keep = 1};
  EXPECT_EQ(message_of<std::runtime_error>([&] { train(*trainer, 20, {}, options, events); }),
            "the metrics cannot be written");
  EXPECT_EQ(saved, (std::vector<std::int64_t>{2}));
  expect_same_files(expected_path, folder / "kept/step-00000002");
}

// The step after the checkpoint fails too, and would be reported if the checkpoint had been written.
TEST(DeviceTrainingLoop, ReportsParametersThatAreNotFiniteRatherThanTheStepAfterThem) {
  const Folder folder;
  const auto trainer = mean_trainer({});
  LoopEvents events;
  events.stepped = [&](const StepReport& report) {
    if (report.step == 4) break_a_parameter(*trainer);
  };
  const LoopOptions options{.checkpoint = folder / "kept", .checkpoint_every = 2, .keep = 1};
  EXPECT_EQ(message_of<CheckpointError>([&] { train(*trainer, 20, {}, options, events); }),
            folder / "kept/step-00000004" + std::string(kNotFinite));
  EXPECT_EQ(trainer->steps_done(), 4);
  EXPECT_EQ(Checkpoint(folder / "kept").info().step, 2);
}

}  // namespace

void begin_on_simulation() {}

}  // namespace penstock::internal::testing
