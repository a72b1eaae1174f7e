// Training in a pipeline: the losses do not depend on ranks, stages and schedule, nor on a resume from a checkpoint.
#include "penstock/train/trainer.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <atomic>
#include <csignal>
#include <filesystem>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "penstock/device/device_list.h"
#include "penstock/runtime/error.h"
#include "penstock/schedule/generators.h"
#include "penstock/train/checkpoint_writer.h"
#include "penstock/train/data.h"
#include "penstock/train/model.h"
#include "tests/device/test_devices.h"
#include "tests/tensor/folder.h"
#include "tests/tensor/values.h"

namespace penstock::internal::testing {
namespace {

constexpr int kMicrobatches = 8;

// A trainer to test. All of them have dropout and clipping.
struct Case {
  std::string schedule = "1F1B";
  int ranks = 1;
  int stages_per_rank = 1;
  int replicas = 1;
  bool sharded = false;
  std::string optimizer = "adamw";
  int accumulate = 1;
};

const AdditionData& sums() {
  static const AdditionData data(/*digits=*/2, /*rows=*/16, /*seed=*/5);
  return data;
}

std::unique_ptr<Trainer> trainer_of(const Case& setup, const Data& data = sums()) {
  const Schedule schedule = generate(
      setup.schedule,
      {.ranks = setup.ranks, .stages_per_rank = setup.stages_per_rank, .microbatches = kMicrobatches / setup.replicas});
  const GptOptions gpt{.layers = 6, .width = 16, .heads = 2, .length = sums().length(), .dropout = 0.1};
  std::vector<std::unique_ptr<Model>> replicas;
  for (int i = 0; i < setup.replicas; ++i) replicas.push_back(gpt_model(gpt, /*seed=*/5, schedule.stages()));
  TrainerOptions options;
  options.steps = 10;
  options.optimizer.name = setup.optimizer;
  options.learning_rate.warmup = 2;
  options.accumulate = setup.accumulate;
  options.clip = 0.5;
  options.sharded = setup.sharded;
  options.seed = 5;
  options.timeout = std::chrono::seconds(60);
  if (is_on_devices()) options.devices = parse_devices("sim").complete();
  return std::make_unique<Trainer>(std::move(replicas), data, schedule, std::move(options));
}

std::vector<double> losses_of(Trainer& trainer, int steps) {
  std::vector<double> losses;
  for (int i = 0; i < steps; ++i) losses.push_back(trainer.step().loss);
  return losses;
}
std::vector<double> losses_of(const Case& setup, int steps = 4) {
  return losses_of(*trainer_of(setup), steps);
}

TEST(Trainer, HasTheSameLossesOnAnyRanksWithAnySchedule) {
  const std::vector<double> whole = losses_of({});
  // The loss falls.
  EXPECT_LT(whole.back(), whole.front());
  struct Kind {
    const char* schedule;
    int stages_per_rank;
  };
  for (const Kind& kind : {Kind{"GPipe", 1}, Kind{"1F1B", 1}, Kind{"Interleaved1F1B", 2}, Kind{"ZBVZeroBubble", 2},
                           Kind{"DualPipeV", 2}}) {
    for (const int ranks : {1, 2, 4}) {
      SCOPED_TRACE(std::string(kind.schedule) + " on " + std::to_string(ranks));
      EXPECT_EQ(whole, losses_of({.schedule = kind.schedule, .ranks = ranks, .stages_per_rank = kind.stages_per_rank}));
    }
  }
}

// Operators of the program outside the trainer keep their number of threads.
TEST(Trainer, LeavesTheNumberOfIntraOpThreadsAsItIs) {
  const auto of_a_new_thread = [] {
    int found = 0;
    std::thread([&found] { found = at::get_num_threads(); }).join();
    return found;
  };
  const int here = at::get_num_threads();
  const int elsewhere = of_a_new_thread();
  const auto trainer = trainer_of({.ranks = 2});
  trainer->step();
  trainer->evaluate({sums().batch(0)});
  EXPECT_EQ(at::get_num_threads(), here);
  EXPECT_EQ(of_a_new_thread(), elsewhere);
}

TEST(Trainer, ClipsTheNormOfAllGradients) {
  std::vector<double> norms;
  for (const int ranks : {1, 3}) {
    const auto trainer = trainer_of({.ranks = ranks});
    norms.push_back(trainer->step().gradient_norm);
  }
  EXPECT_GT(norms[0], 0.5);
  EXPECT_EQ(norms[0], norms[1]);
}

TEST(Trainer, AgreesWithShardedReplicasUpToRounding) {
  // Each replica draws its own dropout, so replicas cannot be compared with one pipeline: replicated parameters are
  // compared with sharded ones.
  const std::vector<double> whole = losses_of({.ranks = 2, .replicas = 2});
  const std::vector<double> sharded = losses_of({.ranks = 2, .replicas = 2, .sharded = true});
  ASSERT_EQ(whole.size(), sharded.size());
  for (std::size_t i = 0; i < whole.size(); ++i) EXPECT_NEAR(whole[i], sharded[i], 1e-5);
}

TEST(Trainer, ResumesFromACheckpointWithOtherRanksAndSchedules) {
  for (const std::string optimizer : {"adamw", "adam", "sgd"}) {
    SCOPED_TRACE(optimizer);
    const std::vector<double> uninterrupted = losses_of({.optimizer = optimizer}, 6);
    const Folder folder;
    {
      const auto first = trainer_of({.ranks = 2, .optimizer = optimizer});
      losses_of(*first, 3);
      EXPECT_EQ(first->save(folder.path(), 3, "{}"), folder / "step-00000003");
    }
    const Checkpoint checkpoint(folder.path());
    for (const Case& setup :
         {Case{.ranks = 2, .optimizer = optimizer},
          Case{.schedule = "ZBVZeroBubble", .ranks = 2, .stages_per_rank = 2, .optimizer = optimizer},
          Case{.schedule = "GPipe", .ranks = 4, .optimizer = optimizer}}) {
      const auto second = trainer_of(setup);
      second->load(checkpoint);
      EXPECT_EQ(second->steps_done(), 3);
      EXPECT_EQ(losses_of(*second, 3), (std::vector<double>(uninterrupted.begin() + 3, uninterrupted.end())));
    }
  }
}

TEST(Trainer, ResumesFromShards) {
  const Folder folder;
  std::vector<double> uninterrupted;
  {
    const auto first = trainer_of({.ranks = 2, .replicas = 2, .sharded = true});
    losses_of(*first, 2);
    first->save(folder.path(), 3, "{}");
    uninterrupted = losses_of(*first, 2);
  }
  const Checkpoint checkpoint(folder.path());
  // The checkpoint has unsharded tensors.
  const auto whole = trainer_of({.ranks = 2, .replicas = 2});
  whole->load(checkpoint);
  const auto sharded = trainer_of({.ranks = 2, .replicas = 2, .sharded = true});
  sharded->load(checkpoint);
  EXPECT_EQ(losses_of(*sharded, 2), uninterrupted);
  const std::vector<double> found = losses_of(*whole, 2);
  for (std::size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], uninterrupted[i], 1e-5);
}

TEST(Trainer, RefusesACheckpointOfAnotherModelAndStaysUnchanged) {
  const Folder folder;
  const CheckpointWriter writer(folder.path(), 1);
  writer.begin();
  writer.write_part(0, {{"x", at::ones({1})}}, {});
  writer.finish({.step = 1, .model = "something else"}, 1, 1);
  const auto trainer = trainer_of({});
  EXPECT_THROW(trainer->load(Checkpoint(folder.path())), CheckpointError);
  EXPECT_EQ(trainer->steps_done(), 0);
  EXPECT_EQ(losses_of(*trainer, 2), losses_of({}, 2));
}

TEST(Trainer, AccumulatesBatches) {
  const auto trainer = trainer_of({.ranks = 2, .accumulate = 3});
  const StepReport report = trainer->step();
  EXPECT_EQ(report.size, 3 * 16 * sums().length());
  EXPECT_EQ(losses_of({.ranks = 2, .accumulate = 3}, 3), losses_of({.accumulate = 3}, 3));
}

// Sums whose loss function throws when it is called for the n-th time.
class FailingSums final : public Data {
 public:
  Batch batch(std::int64_t number) const override { return sums().batch(number); }
  at::Tensor loss(const c10::IValue& output, const c10::IValue& target) const override {
    if (--calls_left == 0) throw std::runtime_error("the loss is lost");
    return sums().loss(output, target);
  }
  double loss_weight(const Batch& microbatch) const override { return sums().loss_weight(microbatch); }
  std::int64_t size_of(const Batch& batch) const override { return sums().size_of(batch); }
  std::string unit() const override { return sums().unit(); }
  std::string description() const override { return sums().description(); }

  mutable std::atomic<int> calls_left = 0;
};

TEST(Trainer, IsUnchangedByAStepThatFailed) {
  for (const Case& setup : {Case{.ranks = 2, .accumulate = 3}, Case{.ranks = 2, .replicas = 2, .accumulate = 3},
                            Case{.ranks = 2, .replicas = 2, .sharded = true, .accumulate = 3}}) {
    SCOPED_TRACE(std::to_string(setup.replicas) + (setup.sharded ? " sharded" : ""));
    const std::vector<double> uninterrupted = losses_of(setup);
    const FailingSums data;
    const auto trainer = trainer_of(setup, data);
    EXPECT_EQ(trainer->step().loss, uninterrupted[0]);
    // The step fails in each of its batches; gradients that earlier batches have accumulated are discarded.
    for (int batch = 0; batch < 3; ++batch) {
      data.calls_left = batch * kMicrobatches + 3;
      EXPECT_THROW(trainer->step(), PipelineError);
      EXPECT_EQ(trainer->steps_done(), 1);
    }
    EXPECT_EQ(losses_of(*trainer, 3), (std::vector<double>(uninterrupted.begin() + 1, uninterrupted.end())));
  }
}

TEST(Trainer, EvaluatesWithoutDropout) {
  const auto trainer = trainer_of({.ranks = 2});
  const std::vector<Batch> held_out = sums().held_out();
  const Trainer::Evaluation first = trainer->evaluate(held_out, /*return_outputs=*/true);
  const Trainer::Evaluation second = trainer->evaluate(held_out);
  EXPECT_EQ(first.loss, second.loss);
  EXPECT_EQ(first.outputs.size(), held_out.size());
  EXPECT_TRUE(second.outputs.empty());
  EXPECT_EQ(losses_of(*trainer, 2), losses_of({.ranks = 2}, 2));
}

TEST(Trainer, ContinuesAfterAnEvaluationThatFailed) {
  const FailingSums data;
  const auto trainer = trainer_of({.ranks = 2}, data);
  data.calls_left = 3;
  EXPECT_THROW(trainer->evaluate(sums().held_out()), PipelineError);
  // The model is in training mode again, with dropout.
  EXPECT_EQ(losses_of(*trainer, 2), losses_of({.ranks = 2}, 2));
}

TEST(Trainer, ReportsTheNormOfGradientsThatAreNotClipped) {
  const auto norm_with = [](double clip) {
    std::vector<std::unique_ptr<Model>> models;
    models.push_back(gpt_model({.layers = 2, .width = 16, .heads = 2, .length = sums().length()}, /*seed=*/5, 2));
    TrainerOptions options;
    options.clip = clip;
    if (is_on_devices()) options.devices = parse_devices("sim").complete();
    return Trainer(std::move(models), sums(), generate("1F1B", {.ranks = 2, .microbatches = 8}), options)
        .step()
        .gradient_norm;
  };
  EXPECT_GT(norm_with(0), 0);
  EXPECT_EQ(norm_with(0), norm_with(0.5));
}

TEST(Trainer, EstimatesTheSizeOfACheckpoint) {
  for (const std::string optimizer : {"adamw", "sgd"}) {
    for (const Case& setup : {Case{.ranks = 2, .optimizer = optimizer},
                              Case{.ranks = 2, .replicas = 2, .sharded = true, .optimizer = optimizer}}) {
      SCOPED_TRACE(optimizer + (setup.sharded ? " sharded" : ""));
      const auto trainer = trainer_of(setup);
      const auto estimated = static_cast<double>(trainer->checkpoint_bytes());
      losses_of(*trainer, 1);
      const Folder folder;
      double written = 0;
      for (const auto& file : std::filesystem::directory_iterator(trainer->save(folder.path(), 1, "{}"))) {
        written += static_cast<double>(file.file_size());
      }
      // The files also have names and padding.
      EXPECT_GT(estimated, 0.7 * written);
      EXPECT_LE(estimated, written);
    }
  }
}

TEST(Trainer, ReportsTheSizesOfItsStages) {
  for (const bool sharded : {false, true}) {
    const auto trainer = trainer_of({.ranks = 2, .replicas = sharded ? 2 : 1, .sharded = sharded});
    const std::vector<StageSize> sizes = trainer->stage_sizes();
    ASSERT_EQ(sizes.size(), 2U);
    EXPECT_EQ(sizes[0].parameters + sizes[1].parameters, std::ssize(trainer->model().parameter_names()));
    EXPECT_EQ(sizes[0].elements, trainer_of({.ranks = 2})->stage_sizes()[0].elements);
    EXPECT_GT(sizes[1].elements, 0);
  }
}

// Ranks write their parts in phases. When one fails, nothing is left of the checkpoint.
TEST(Trainer, LeavesNothingOfACheckpointThatCannotBeWritten) {
  const auto trainer = trainer_of({.ranks = 2});
  losses_of(*trainer, 1);
  const Folder folder;
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  const rlimit little{.rlim_cur = 4096, .rlim_max = before.rlim_max};
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ::setrlimit(RLIMIT_FSIZE, &little);
  EXPECT_THROW(trainer->save(folder.path(), 3, "{}"), CheckpointError);
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(folder.files(), 0U);
  EXPECT_EQ(trainer->save(folder.path(), 3, "{}"), folder / "step-00000001");
}

TEST(LearningRate, FallsToItsMinimum) {
  constexpr std::int64_t kSteps = 1000;
  for (const std::string schedule : {"linear", "cosine"}) {
    LearningRate rate{.rate = 0.2, .schedule = schedule, .warmup = 10};
    EXPECT_DOUBLE_EQ(rate.at(0, kSteps), 0.02);
    EXPECT_DOUBLE_EQ(rate.at(10, kSteps), 0.2);
    EXPECT_DOUBLE_EQ(rate.at(kSteps - 1, kSteps), 0.01);
    rate.minimum = 0.05;
    EXPECT_DOUBLE_EQ(rate.at(10, kSteps), 0.2);
    EXPECT_DOUBLE_EQ(rate.at(kSteps - 1, kSteps), 0.05);
    rate.minimum = 0;
    EXPECT_DOUBLE_EQ(rate.at(kSteps - 1, kSteps), 0);
    // In a run that ends with its warmup, or one step later, the rate does not fall.
    EXPECT_DOUBLE_EQ(rate.at(9, 10), 0.2);
    EXPECT_DOUBLE_EQ(rate.at(10, 11), 0.2);
    rate.rate = 0;
    EXPECT_DOUBLE_EQ(rate.at(kSteps - 1, kSteps), 0);
  }
}

// Either of two thread replicas may allocate the buffer of a reduction, which varies between runs.
double memory_tolerance(const Case& setup) {
  return setup.sharded ? 0.2 : 0.1;
}

TEST(Trainer, PredictsTheMemoryOfRanks) {
  PENSTOCK_ON_CPU_ALONE("memory is not predicted on devices");
  for (const Case& setup : {Case{.schedule = "GPipe", .ranks = 2}, Case{.schedule = "1F1B", .ranks = 2},
                            Case{.schedule = "Interleaved1F1B", .ranks = 2, .stages_per_rank = 2},
                            Case{.schedule = "ZBVZeroBubble", .ranks = 2, .stages_per_rank = 2},
                            Case{.schedule = "1F1B", .ranks = 2, .replicas = 2},
                            Case{.schedule = "1F1B", .ranks = 2, .replicas = 2, .sharded = true}}) {
    SCOPED_TRACE(setup.schedule + ", replicas " + std::to_string(setup.replicas) + (setup.sharded ? ", sharded" : ""));
    const auto trainer = trainer_of(setup);
    losses_of(*trainer, 3);
    const std::vector<RankMemory> memory = trainer->memory();
    ASSERT_EQ(memory.size(), 2U);
    for (const RankMemory& rank : memory) {
      const auto measured = static_cast<double>(rank.measured);
      EXPECT_GT(measured, 0);
      EXPECT_NEAR(static_cast<double>(rank.predicted), measured, memory_tolerance(setup) * measured);
    }
  }
}

TEST(Trainer, RecordsTheMemoryOfEachAction) {
  const auto trainer = trainer_of({.schedule = "GPipe", .ranks = 2, .accumulate = 2});
  losses_of(*trainer, 3);
  trainer->evaluate({sums().batch(0)});
  const std::vector<RankMemory> memory = trainer->memory();
  const Record record = trainer->records().back();
  const Timeline timeline = timeline_of(trainer->pipeline().schedule(), record);
  for (std::size_t rank = 0; rank < 2; ++rank) {
    std::int64_t peak = 0;
    for (const ActionRecord& action : record[rank]) {
      EXPECT_GT(action.allocated, 0);
      EXPECT_GE(action.peak_allocated, action.allocated);
      peak = std::max(peak, action.peak_allocated);
    }
    // The peak of the run includes the optimizer step.
    EXPECT_LE(peak, memory[rank].measured);
    EXPECT_GT(static_cast<double>(peak), 0.5 * static_cast<double>(memory[rank].measured));
    EXPECT_EQ(timeline.ranks[rank].peak_bytes, static_cast<double>(peak));
    EXPECT_EQ(timeline.ranks[rank].memory.size(), 2 * record[rank].size());
    // All forwards come before all backwards, so activations pile up in between.
    EXPECT_GT(record[rank][record[rank].size() / 2].allocated, record[rank].front().allocated);
    EXPECT_GT(timeline.ranks[rank].span, 0);
    EXPECT_LE(timeline.ranks[rank].span, timeline.longest_span);
  }
}

// The ranks of each replica are measured separately: their memory does not include that of other replicas.
TEST(Trainer, MeasuresTheMemoryOfEachReplicaSeparately) {
  PENSTOCK_ON_CPU_ALONE("memory is not predicted on devices");
  const auto alone = trainer_of({.schedule = "GPipe", .ranks = 2});
  const auto trainer = trainer_of({.schedule = "GPipe", .ranks = 2, .replicas = 2});
  losses_of(*alone, 3);
  losses_of(*trainer, 3);
  const std::vector<RankMemory> whole = alone->memory();
  const std::vector<RankMemory> memory = trainer->memory();
  ASSERT_EQ(memory.size(), 2U);
  for (std::size_t rank = 0; rank < 2; ++rank) {
    // Each replica has all the parameters, and half as many microbatches of the same size.
    EXPECT_LT(memory[rank].predicted, whole[rank].predicted) << rank;
    EXPECT_GT(memory[rank].predicted, whole[rank].predicted / 2) << rank;
  }
}

TEST(Trainer, HasTheRecordsOfTheLastSteps) {
  const auto trainer = trainer_of({.ranks = 2});
  EXPECT_TRUE(trainer->records().empty());
  losses_of(*trainer, 3);
  const std::vector<Record> records = trainer->records();
  ASSERT_EQ(records.size(), 3U);
  const Schedule& schedule = trainer->pipeline().schedule();
  for (const Record& record : records) {
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_EQ(record[static_cast<std::size_t>(rank)].size(), schedule.actions(rank).size());
    }
  }
  const Costs costs = costs_of(schedule, records);
  EXPECT_GT(costs.of_link(0, 1).latency, 0);
  EXPECT_GT(simulate(schedule, costs).makespan, 0);
}

}  // namespace
}  // namespace penstock::internal::testing
