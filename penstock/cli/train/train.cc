// penstock train: a model made better, from data to a checkpoint.
#include <array>
#include <csignal>
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
#include "penstock/cli/train/directories.h"
#include "penstock/cli/train/dry_run.h"
#include "penstock/cli/train/options.h"
#include "penstock/cli/train/progress.h"
#include "penstock/runtime/digest.h"
#include "penstock/schedule/draw.h"
#include "penstock/schedule/generators.h"
#include "penstock/schedule/json.h"
#include "penstock/train/agreement.h"
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
        transport_(std::move(transport)) {
    // What was chosen where nothing was said.
    configuration_["ranks"] = setup_.schedule->ranks();
    configuration_["microbatches"] = setup_.schedule->microbatches();
    if (options.learning_rate.schedule != "constant") configuration_["min-lr"] = options.learning_rate.end();
  }

  int ranks_needed() const { return setup_.schedule->ranks() * options_.data_parallel; }

  // Returns an exit code.
  int train(const Agreement& agreement) {
    agreement.require_same_options(resolved_options());
    require_processes();
    // Locked until the run ends.
    std::optional<RunDirectories> directories;
    agreement.fail_together([&] {
      if (is_coordinator()) directories.emplace(options_);
      setup_.data->check({.replicas = options_.data_parallel,
                          .eval_replicas = transport_ == nullptr ? options_.data_parallel : 1,
                          .microbatches = setup_.schedule->microbatches()});
    });
    Trainer trainer(std::move(setup_.replicas), *setup_.data, *setup_.schedule, trainer_options());
    agreement.fail_together([&] {
      if (options_.resume) resume(trainer);
    });
    agreement.require_same_options({{"step to resume from", std::to_string(trainer.steps_done())}});
    if (trainer.steps_done() >= options_.steps) {
      if (is_coordinator()) {
        if (!options_.dry_run) remove_unfinished_checkpoints(options_.checkpoint);
        std::cout << "nothing to do: step " << trainer.steps_done() << " of " << options_.steps
                  << " is done.\n  Hint: --steps N continues with more steps." << std::endl;
      }
      return kYes;
    }
    const std::int64_t checkpoint_bytes = trainer.checkpoint_bytes();
    agreement.fail_together([&] {
      if (is_coordinator()) require_space(*directories, trainer, checkpoint_bytes);
    });
    if (options_.dry_run) {
      if (is_coordinator()) introduce(trainer);
      dry_run(trainer, held_out_, options_);
      return kYes;
    }

    std::optional<Progress> progress;
    LoopEvents events = events_of(progress);
    const std::int64_t first = trainer.steps_done();
    std::chrono::steady_clock::time_point began;
    events.starting = [&] {
      if (is_coordinator()) introduce(trainer);
      began = std::chrono::steady_clock::now();
      catch_interruptions();
    };
    // What an earlier run has left stays until the first step has succeeded.
    events.begun = [&] {
      agreement.fail_together([&] {
        if (!is_coordinator()) return;
        if (options_.overwrite) directories->clear();
        const auto aside = options_.resume && first == 0 ? directories->set_metrics_aside() : std::nullopt;
        write_output(directories->file("config.json"),
                     [&](std::ostream& out) { out << configuration_.dump(2) << "\n"; });
        progress.emplace(directories->metrics(), first, options_.steps, options_.log_every, setup_.data->unit(), began);
        if (aside)
          progress->say("there was no checkpoint to resume from; the metrics of the earlier run are in " + *aside);
      });
    };
    const int stop_code = penstock::train(trainer, options_.steps, held_out_,
                                          {.eval_every = options_.eval_every,
                                           .eval_outputs = sums() != nullptr,
                                           .checkpoint = options_.checkpoint,
                                           .checkpoint_every = options_.checkpoint_every,
                                           .keep = options_.keep,
                                           .configuration = configuration_.dump()},
                                          events);
    summarize(trainer, progress);
    if (stop_code == 0) {
      show_what_it_learnt(trainer, progress);
      return kYes;
    }
    if (progress) {
      progress->say("stopped after step " + std::to_string(trainer.steps_done()) +
                    (options_.checkpoint.empty() ? "." : "; --resume continues from here."));
    }
    return stop_code;
  }

 private:
  std::string path(const char* name) const { return (fs::path(options_.output) / name).string(); }

  // Returns what the ranks of a run have in common besides their options: what the files say that they have read, and
  // what was chosen by it.
  RankOptions resolved_options() const {
    if (transport_ == nullptr) return {};
    RankOptions files{{"data (names, sizes or checksum)", setup_.data->fingerprint()},
                      {"ranks", std::to_string(setup_.schedule->ranks())},
                      {"microbatches", std::to_string(setup_.schedule->microbatches())}};
    if (!options_.run.csv.empty()) {
      files["csv (checksum)"] = std::to_string(Digest().add(read_file(options_.run.csv)).value());
    }
    if (!options_.is_gpt()) files["model (checksum)"] = std::to_string(Archive(options_.cut.model).checksum());
    if (const std::optional<WeightFiles> weights = options_.weights.read()) {
      files["weights (checksum)"] = std::to_string(checksum_of(*weights));
    }
    return files;
  }

  // Returns true on the process that prints progress and writes shared files.
  bool is_coordinator() const { return transport_ == nullptr || transport_->rank() == 0; }

  TrainerOptions trainer_options() const {
    TrainerOptions trainer;
    trainer.transport = transport_;
    trainer.steps = options_.steps;
    trainer.optimizer = options_.optimizer;
    trainer.learning_rate = options_.learning_rate;
    trainer.accumulate = options_.accumulate;
    trainer.clip = options_.clip;
    trainer.on_nonfinite = options_.on_nonfinite == "skip" ? OnNonFinite::Skip : OnNonFinite::Stop;
    trainer.max_skipped = options_.max_skipped;
    trainer.sharded = options_.shard;
    trainer.seed = options_.run.seed;
    trainer.intra_op_threads = options_.run.threads;
    trainer.timeout = options_.run.timeout_in_milliseconds();
    return trainer;
  }

  // Continues from the last checkpoint, if there is one.
  void resume(Trainer& trainer) const {
    if (!last_checkpoint(options_.checkpoint)) return;
    require_one_run(options_.checkpoint);
    const Checkpoint checkpoint(options_.checkpoint);
    const auto before = parse_json(checkpoint.info().configuration).value("optimizer", "");
    if (before != options_.optimizer.name) {
      throw CheckpointError(checkpoint.path() + ": has what " + before + " remembers, and the optimizer is " +
                            options_.optimizer.name + ".\n  Hint: --optimizer " + before + " continues it.");
    }
    trainer.load(checkpoint);
  }

  void require_space(const RunDirectories& directories, Trainer& trainer, std::int64_t checkpoint_bytes) const {
    // A line of metrics, and an action of the timeline, are shorter than this.
    constexpr std::int64_t kLine = 400;
    const Schedule& schedule = trainer.pipeline().schedule();
    const std::int64_t steps = options_.steps - trainer.steps_done();
    std::int64_t lines = steps;
    for (int rank = 0; rank < schedule.ranks(); ++rank) lines += std::ssize(schedule.actions(rank));
    // Those of a run that is meant to be stopped do not count for ever.
    constexpr std::int64_t kMostLines = 100'000;
    directories.require_space(steps, checkpoint_bytes, std::min(lines, kMostLines) * kLine);
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
    if (trainer.steps_done() > 0) {
      std::cout << "continues after step " << trainer.steps_done() << "\n";
    } else if (!options_.weights.path.empty()) {
      std::cout << "starts from the weights of " << options_.weights.path << "\n";
    }
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
    events.stop_code = [] { return interruptions() > 0 ? interruption_code() : 0; };
    if (!is_coordinator()) return events;
    events.stepped = [&](const StepReport& report) { progress->stepped(report); };
    events.evaluated = [&](std::int64_t step, const Trainer::Evaluation& evaluation) {
      if (sums() != nullptr) {
        accuracy_ = accuracy(evaluation);
        progress->evaluated(step, evaluation, "accuracy", accuracy_);
      } else {
        progress->evaluated(step, evaluation);
      }
      last_ = evaluation;
    };
    events.saved = [&](std::int64_t step, const std::string& where) {
      progress->say("step " + std::to_string(step) + ": checkpoint in " + where);
    };
    return events;
  }

  // Prints the statistics of the run and writes the timeline. All processes call it.
  void summarize(Trainer& trainer, std::optional<Progress>& progress) {
    const std::vector<Record> records = trainer.records();
    const std::vector<RankMemory> memory = trainer.memory();
    if (progress && !records.empty()) sum_up(trainer, records, memory, *progress);
  }

  // Shows sums or a sample of text. All processes call it.
  void show_what_it_learnt(Trainer& trainer, std::optional<Progress>& progress) {
    std::string sample;
    const bool is_text = options_.is_gpt() && sums() == nullptr;
    if (is_text) sample = write_text(trainer.writing_pipeline(), options_.length, "", {.seed = options_.run.seed});
    if (!progress) return;
    if (sums() != nullptr) show_sums(*progress);
    if (is_text) progress->say("A sample:\n" + sample);
  }

  // Throughput, bubble and memory, and the page.
  void sum_up(Trainer& trainer, const std::vector<Record>& records, const std::vector<RankMemory>& memory,
              Progress& progress) const {
    const Schedule& schedule = trainer.pipeline().schedule();
    std::vector<double> bubbles;
    for (const Record& record : records) bubbles.push_back(timeline_of(schedule, record).bubble);
    const Timeline measured = timeline_of(schedule, records.back());
    const Costs costs = costs_of(schedule, records);
    const Timeline simulated = simulate_records(schedule, records);
    const std::vector<double>& losses = progress.losses();
    const std::string page = path("timeline.html");
    write_output(page, [&](std::ostream& out) {
      draw_html(out, {.schedule = schedule,
                      .timeline = measured,
                      .costs = costs,
                      .title = "The last step",
                      .name = "measured",
                      .second_timeline = &simulated,
                      .second_name = "simulated",
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
      text +=
          "  " + sums()->written(batch, output, row) + (sums()->right_sums(alone, one) == 1 ? "" : "   wrong") + "\n";
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
  // A limit on the size of files is an error of the write, as a full disk is.
  std::signal(SIGXFSZ, SIG_IGN);
  const std::chrono::milliseconds timeout = options.run.timeout_in_milliseconds();
  const auto as_rank = [&] {
    const std::shared_ptr<Transport> transport =
        c10d_transport(rendezvous(timeout, say_waiting), {.agreed = options.shared_by_ranks(configuration)});
    const Agreement agreement(transport.get(), timeout);
    std::optional<Run> run;
    agreement.fail_together([&] { run.emplace(options, configuration, transport); });
    return run->train(agreement);
  };
  if (OwnRanks::is_rank()) {
    OwnRanks::run([&](const fs::path&, int) {
      const int code = as_rank();
      if (code != kYes) std::exit(code);
    });
  }
  if (is_in_rank_environment()) return as_rank();
  Run run(options, configuration, nullptr);
  if (options.run.transport == "threads") return run.train(Agreement(nullptr, timeout));
  OwnRanks ranks(run.ranks_needed());
  try {
    ranks.wait(Clock::now() + std::chrono::hours(24 * 365));
  } catch (const std::runtime_error&) {
    if (interruptions() > 0) return interruption_code();
    throw;
  }
  return kYes;
}

}  // namespace

void add_train(CLI::App& command, int& exit) {
  const auto options = std::make_shared<TrainOptions>();
  options->add_to(command);
  on_call(command, [options, &command, &exit] {
    options->read_config(command);
    options->require_fit(command);
    options->cut.limits.apply();
    exit = train(*options, options->resolved(command));
  });
}

}  // namespace penstock::cli
