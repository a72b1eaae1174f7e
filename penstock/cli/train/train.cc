// penstock train: a model made better, from data to a checkpoint.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <string>

#include "penstock/cli/command.h"
#include "penstock/cli/interruption.h"
#include "penstock/cli/output.h"
#include "penstock/cli/program/commands.h"
#include "penstock/cli/program/own_ranks.h"
#include "penstock/cli/train/options.h"
#include "penstock/cli/train/progress.h"
#include "penstock/schedule/draw.h"
#include "penstock/schedule/generators.h"
#include "penstock/train/write_text.h"
#include "penstock/transport/c10d.h"
#include "penstock/transport/rendezvous.h"

namespace penstock::cli {
namespace {

namespace fs = std::filesystem;

std::string percent(double part) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.1f %%", 100 * part);
  return text.data();
}

// One run, in this process: all of it, or one rank's part.
class Run {
 public:
  Run(const TrainOptions& options, nlohmann::json configuration, std::shared_ptr<Transport> transport)
      : options_(options),
        configuration_(std::move(configuration)),
        setup_(set_up(options, transport == nullptr ? options.data_parallel : 1)),
        held_out_(setup_.data->held_out()),
        transport_(std::move(transport)) {}

  int ranks_needed() const { return setup_.schedule->ranks() * options_.data_parallel; }

  // An exit code.
  int train() {
    require_processes();
    TrainerOptions trainer_options;
    trainer_options.transport = transport_;
    trainer_options.steps = options_.steps;
    trainer_options.optimizer = options_.optimizer;
    trainer_options.learning_rate = options_.learning_rate;
    trainer_options.accumulate = options_.accumulate;
    trainer_options.clip = options_.clip;
    trainer_options.on_nonfinite = options_.on_nonfinite == "skip" ? OnNonFinite::Skip : OnNonFinite::Stop;
    trainer_options.max_skipped = options_.max_skipped;
    trainer_options.sharded = options_.shard;
    trainer_options.seed = options_.run.seed;
    trainer_options.intra_op_threads = options_.run.threads;
    trainer_options.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(options_.run.timeout * 1000));
    Trainer trainer(std::move(setup_.replicas), *setup_.data, *setup_.schedule, std::move(trainer_options));
    if (options_.resume && options_.checkpoint.empty()) {
      throw std::runtime_error("--resume goes on from the checkpoints of --checkpoint DIR, which is missing.");
    }
    if (options_.resume && has_checkpoint(options_.checkpoint)) resume(trainer);

    std::optional<Progress> progress;
    if (trainer.speaks()) {
      std::error_code failed;
      fs::create_directories(options_.output, failed);
      if (failed) throw std::runtime_error(options_.output + ": cannot be made a folder: " + failed.message() + ".");
      write_output(path("config.json"), [&](std::ostream& out) { out << configuration_.dump(2) << "\n"; });
      introduce(trainer);
      progress.emplace(path("metrics.jsonl"), trainer.steps_done(), options_.steps, setup_.data->unit());
    }
    const LoopEvents events = events_of(progress);
    catch_interruptions();
    const bool is_done = penstock::train(trainer, options_.steps, held_out_,
                                         {.eval_every = options_.eval_every,
                                          .eval_outputs = sums() != nullptr,
                                          .checkpoint = options_.checkpoint,
                                          .checkpoint_every = options_.checkpoint_every,
                                          .keep = options_.keep,
                                          .configuration = configuration_.dump()},
                                         events);
    if (!is_done) {
      if (progress) {
        progress->say("stopped after step " + std::to_string(trainer.steps_done()) +
                      (options_.checkpoint.empty() ? "." : "; --resume goes on from here."));
      }
      return kInterrupted;
    }
    conclude(trainer, progress);
    return kYes;
  }

 private:
  std::string path(const char* name) const { return (fs::path(options_.output) / name).string(); }

  void resume(Trainer& trainer) const {
    const Checkpoint checkpoint(options_.checkpoint);
    const auto before = nlohmann::json::parse(checkpoint.info().configuration).value("optimizer", "");
    if (before != options_.optimizer.name) {
      throw CheckpointError(checkpoint.path() + ": has what " + before + " remembers, and the optimizer is " +
                            options_.optimizer.name + ".\n  Hint: --optimizer " + before + " goes on.");
    }
    trainer.load(checkpoint);
  }

  void require_processes() const {
    if (transport_ == nullptr || transport_->ranks() == ranks_needed()) return;
    throw std::runtime_error("there are " + std::to_string(transport_->ranks()) + " processes, and " +
                             std::to_string(setup_.schedule->ranks()) + " ranks for each of " +
                             std::to_string(options_.data_parallel) + " replicas need " +
                             std::to_string(ranks_needed()) + ".\n  Hint: see --ranks and --data-parallel.");
  }

  void introduce(const Trainer& trainer) const {
    const Schedule& schedule = *setup_.schedule;
    std::cout << (options_.is_gpt() ? trainer.model().description() : options_.cut.model) << "\n"
              << setup_.data->description() << "\n"
              << schedule.stages() << " stages on " << schedule.ranks() << (schedule.ranks() == 1 ? " rank" : " ranks")
              << (transport_ == nullptr ? " (threads), " : " (processes), ")
              << (options_.run.csv.empty() ? std::string(find_generator(options_.run.schedule).name) : options_.run.csv)
              << ", " << schedule.microbatches() << " microbatches";
    if (options_.data_parallel > 1) {
      std::cout << ", " << options_.data_parallel << (options_.shard ? " replicas, sharded" : " replicas");
    }
    std::cout << "\n";
    if (trainer.steps_done() > 0) std::cout << "goes on after step " << trainer.steps_done() << "\n";
    std::cout << std::endl;
  }

  const AdditionData* sums() const { return dynamic_cast<const AdditionData*>(setup_.data.get()); }

  double accuracy(const Trainer::Evaluation& evaluation) const {
    double right = 0;
    double all = 0;
    for (std::size_t i = 0; i < held_out_.size(); ++i) {
      const at::Tensor output = evaluation.outputs[i].toTensor();
      right += sums()->right_sums(held_out_[i], output);
      all += static_cast<double>(output.size(0));
    }
    return right / all;
  }

  LoopEvents events_of(std::optional<Progress>& progress) {
    LoopEvents events;
    events.wants_to_stop = [] { return interruptions() > 0; };
    if (!progress) return events;
    events.stepped = [&](const StepReport& report) { progress->stepped(report); };
    events.evaluated = [&](std::int64_t step, const Trainer::Evaluation& evaluation) {
      if (sums() != nullptr) {
        accuracy_ = accuracy(evaluation);
        progress->evaluated(step, evaluation.loss, "accuracy", accuracy_);
      } else {
        progress->evaluated(step, evaluation.loss);
      }
      last_ = evaluation;
    };
    events.saved = [&](std::int64_t step, const std::string& where) {
      progress->say("step " + std::to_string(step) + ": checkpoint in " + where);
    };
    return events;
  }

  // What has come of it. All processes come here, as they have to tell one another.
  void conclude(Trainer& trainer, std::optional<Progress>& progress) {
    const std::vector<Record> records = trainer.records();
    const std::vector<RankMemory> memory = trainer.memory();
    std::string sample;
    const bool is_text = options_.is_gpt() && sums() == nullptr;
    if (is_text) sample = write_text(trainer.writing_pipeline(), options_.length, "", {.seed = options_.run.seed});
    if (!progress) return;
    if (!records.empty()) sum_up(trainer, records, memory, *progress);
    if (sums() != nullptr) show_sums(*progress);
    if (is_text) progress->say("A sample:\n" + printable(sample));
  }

  // Throughput, bubble and memory, and the page.
  void sum_up(Trainer& trainer, const std::vector<Record>& records, const std::vector<RankMemory>& memory,
              Progress& progress) const {
    const Schedule& schedule = trainer.pipeline().schedule();
    std::vector<double> bubbles;
    for (const Record& record : records) bubbles.push_back(timeline_of(schedule, record).bubble);
    const Timeline measured = timeline_of(schedule, records.back());
    const Costs costs = costs_of(schedule, records);
    const Timeline simulated = simulate(schedule, costs);
    const std::vector<double>& losses = progress.losses();
    const std::string page = path("timeline.html");
    write_output(page, [&](std::ostream& out) {
      draw_html(out, {.schedule = schedule,
                      .timeline = measured,
                      .costs = costs,
                      .title = "The last step",
                      .name = "measured",
                      .beside = &simulated,
                      .beside_name = "simulated",
                      .unit = "ms",
                      .curve_name = "Loss",
                      .curve = losses,
                      .curve_first_step =
                          static_cast<int>(trainer.steps_done() - static_cast<std::int64_t>(losses.size()) + 1)});
    });
    std::string text = "\nthroughput   " + short_number(progress.units_per_second()) + " " + setup_.data->unit() +
                       "/s\nbubble       " + percent(median(bubbles)) + " measured, " + percent(simulated.bubble) +
                       " simulated\n";
    for (std::size_t rank = 0; rank < memory.size(); ++rank) {
      text += (rank == 0 ? "memory       rank " : "             rank ") + std::to_string(rank) + ": " +
              short_number(static_cast<double>(memory[rank].measured)) + "B measured, " +
              short_number(static_cast<double>(memory[rank].predicted)) + "B predicted\n";
    }
    if (progress.skipped() > 0) {
      text += "skipped      " + std::to_string(progress.skipped()) + " of " + std::to_string(options_.steps) +
              " steps, whose loss or gradients were not finite\n";
    }
    progress.say(text + "timeline     " + page + "\n");
  }

  void show_sums(Progress& progress) const {
    constexpr std::int64_t kShown = 6;
    std::size_t count = 0;
    for (const Batch& batch : held_out_) count += static_cast<std::size_t>(batch.args[0].toTensor().size(0));
    std::string text =
        "Sums that it has never seen: " + percent(accuracy_) + " of " + std::to_string(count) + " right.\n";
    const at::Tensor output = last_.outputs.front().toTensor();
    const Batch& batch = held_out_.front();
    for (std::int64_t row = 0; row < std::min(kShown, output.size(0)); ++row) {
      const at::Tensor one = output.narrow(0, row, 1);
      const Batch alone{.args = {batch.args[0].toTensor().narrow(0, row, 1)},
                        .kwargs = {},
                        .target = batch.target.toTensor().narrow(0, row, 1)};
      text += "  " + printable(sums()->written(batch, output, row)) +
              (sums()->right_sums(alone, one) == 1 ? "" : "   wrong") + "\n";
    }
    progress.say(text);
  }

  const TrainOptions& options_;
  nlohmann::json configuration_;
  TrainSetup setup_;
  std::vector<Batch> held_out_;
  std::shared_ptr<Transport> transport_;
  double accuracy_ = 0;
  Trainer::Evaluation last_;
};

int train(const TrainOptions& options, const nlohmann::json& configuration) {
  const auto as_rank = [&] {
    const auto timeout = std::chrono::milliseconds(static_cast<std::int64_t>(options.run.timeout * 1000));
    return Run(options, configuration, c10d_transport(rendezvous(timeout, say_waiting))).train();
  };
  if (OwnRanks::is_rank()) {
    OwnRanks::run([&](const fs::path&, int) {
      const int code = as_rank();
      if (code != kYes) std::exit(code);
    });
  }
  if (is_in_rank_environment()) return as_rank();
  Run run(options, configuration, nullptr);
  if (options.run.transport == "threads") return run.train();
  OwnRanks ranks(run.ranks_needed());
  try {
    ranks.wait(Clock::now() + std::chrono::hours(24 * 365));
  } catch (const std::runtime_error&) {
    if (interruptions() > 0) return kInterrupted;
    throw;
  }
  return kYes;
}

}  // namespace

void add_train(CLI::App& command, int& exit) {
  const auto options = std::make_shared<TrainOptions>();
  options->add_to(command);
  on_call(command, [options, &command, &exit] {
    options->require_fit(command);
    options->read_config(command);
    exit = train(*options, TrainOptions::resolved(command));
  });
}

}  // namespace penstock::cli
