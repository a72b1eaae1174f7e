// penstock train: trains a GPT or an exported model in a pipeline.
#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <string>

#include "penstock/base/text.h"
#include "penstock/cli/byte_units.h"
#include "penstock/cli/command.h"
#include "penstock/cli/interruption.h"
#include "penstock/cli/output.h"
#include "penstock/cli/program/commands.h"
#include "penstock/cli/program/local_ranks.h"
#include "penstock/cli/train/directories.h"
#include "penstock/cli/train/dry_run.h"
#include "penstock/cli/train/memory_limit.h"
#include "penstock/cli/train/options.h"
#include "penstock/cli/train/progress.h"
#include "penstock/cli/train/setup.h"
#include "penstock/cli/train/summary.h"
#include "penstock/program/reader/archive.h"
#include "penstock/runtime/digest.h"
#include "penstock/schedule/json.h"
#include "penstock/train/agreement.h"
#include "penstock/train/checkpoint_directory.h"
#include "penstock/train/generate_text.h"
#include "penstock/transport/rendezvous.h"

namespace penstock::internal::cli {
namespace {

namespace fs = std::filesystem;

// One run in this process: all ranks on threads or, with a transport, one process rank.
class Run {
 public:
  Run(const TrainOptions& options, nlohmann::json configuration, const DeviceList& devices,
      std::shared_ptr<Transport> transport)
      : options_(options),
        devices_(devices),
        configuration_(std::move(configuration)),
        setup_(set_up(options, transport == nullptr ? options.data_parallel : 1)),
        held_out_(setup_.data->held_out()),
        transport_(std::move(transport)) {
    // Values that the options left open.
    configuration_["ranks"] = setup_.schedule->ranks();
    configuration_["microbatches"] = setup_.schedule->microbatches();
    if (options.learning_rate.schedule != "constant") configuration_["min-lr"] = options.learning_rate.end();
  }

  int ranks_needed() const { return setup_.schedule->ranks() * options_.data_parallel; }

  // Returns an exit code.
  int train(const Agreement& agreement) {
    agreement.require_same_options(resolved_options());
    require_processes();
    // The coordinator holds their locks until the run ends.
    std::optional<RunDirectories> directories;
    agreement.fail_together([&] {
      if (is_coordinator()) directories.emplace(options_);
      require_splittable(setup_, options_, transport_ != nullptr);
    });
    // Before the weights are loaded, so that there is one copy of them at a time.
    if (!options_.memory.empty()) require_memory(options_, setup_, trainer_options(), agreement);
    agreement.fail_together([&] {
      for (const int stage : local_stages(*setup_.schedule, transport_.get())) {
        for (const auto& replica : setup_.replicas) replica->load_stage(stage);
      }
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
                  << " is done.\n  Hint: continue with a larger --steps N." << std::endl;
      }
      return kSuccess;
    }
    const std::int64_t checkpoint_bytes = trainer.checkpoint_bytes();
    agreement.fail_together([&] {
      if (is_coordinator()) require_space(*directories, trainer, checkpoint_bytes);
    });
    if (options_.dry_run) {
      if (is_coordinator()) print_introduction(trainer, options_, setup_, kind_of_ranks());
      dry_run(trainer, held_out_, options_);
      return kSuccess;
    }

    std::optional<Progress> progress;
    LoopEvents events = events_of(progress);
    const std::int64_t first = trainer.steps_done();
    std::chrono::steady_clock::time_point began;
    events.starting = [&] {
      if (is_coordinator()) print_introduction(trainer, options_, setup_, kind_of_ranks());
      began = std::chrono::steady_clock::now();
      catch_interruptions();
    };
    // Files of an earlier run stay until the first step has succeeded.
    events.begun = [&] {
      agreement.fail_together([&] {
        if (!is_coordinator()) return;
        if (options_.overwrite) directories->clear();
        const auto renamed = options_.resume && first == 0 ? directories->rename_old_metrics() : std::nullopt;
        write_output(directories->file("config.json"),
                     [&](std::ostream& out) { out << configuration_.dump(2) << "\n"; });
        progress.emplace(directories->metrics(), first, options_.steps, options_.log_every, setup_.data->unit(), began);
        if (renamed)
          progress->print("no checkpoint to resume from; the metrics of the earlier run are now in " + *renamed);
      });
    };
    const int stop_code = internal::train(trainer, options_.steps, held_out_,
                                          {.eval_every = options_.eval_every,
                                           .eval_outputs = sums() != nullptr,
                                           .checkpoint = options_.checkpoint,
                                           .checkpoint_every = options_.checkpoint_every,
                                           .keep = options_.keep,
                                           .configuration = configuration_.dump()},
                                          events);
    summarize(trainer, progress);
    if (stop_code == 0) {
      print_sample(trainer, progress);
      return kSuccess;
    }
    if (progress) {
      progress->print("stopped after step " + std::to_string(trainer.steps_done()) +
                      (options_.checkpoint.empty() ? "." : "; continue with --resume."));
    }
    return stop_code;
  }

 private:
  std::string path(const char* name) const { return (fs::path(options_.output) / name).string(); }

  // Returns further values that must be equal on all ranks: checksums of the files they have read, and the numbers of
  // ranks and microbatches that follow from them.
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

  std::string kind_of_ranks() const {
    const std::string kind = transport_ == nullptr ? "threads" : "processes";
    return devices_.is_cpu() ? kind : kind + ", " + devices_.text();
  }

  // Returns true on the process that prints progress and writes shared files.
  bool is_coordinator() const { return transport_ == nullptr || transport_->rank() == 0; }

  TrainerOptions trainer_options() const {
    TrainerOptions trainer;
    trainer.transport = transport_;
    trainer.devices = devices_;
    if (options_.autocast() == at::kHalf) trainer.grad_scaler.emplace();
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
      throw CheckpointError(checkpoint.path() + ": has the state of optimizer " + before + ", expected " +
                            options_.optimizer.name + ".\n  Hint: continue with --optimizer " + before + ".");
    }
    trainer.load(checkpoint);
  }

  void require_space(const RunDirectories& directories, Trainer& trainer, std::int64_t checkpoint_bytes) const {
    // Upper bound of the bytes of a line of metrics and of an action in the timeline.
    constexpr std::int64_t kLine = 400;
    const Schedule& schedule = trainer.pipeline().schedule();
    const std::int64_t steps = options_.steps - trainer.steps_done();
    std::int64_t lines = steps;
    for (int rank = 0; rank < schedule.ranks(); ++rank) lines += std::ssize(schedule.actions(rank));
    // A run with a huge number of steps is meant to be stopped early.
    constexpr std::int64_t kMostLines = 100'000;
    directories.require_space(steps, checkpoint_bytes, std::min(lines, kMostLines) * kLine);
  }

  void require_processes() const {
    if (transport_ == nullptr || transport_->ranks() == ranks_needed()) return;
    throw std::runtime_error(concat("found ", transport_->ranks(), " processes, expected ", ranks_needed(), ": ",
                                    setup_.schedule->ranks(), " ranks for each of ", options_.data_parallel,
                                    " replicas.\n  Hint: see --ranks and --data-parallel."));
  }

  const AdditionData* sums() const { return dynamic_cast<const AdditionData*>(setup_.data.get()); }

  double accuracy(const Trainer::Evaluation& evaluation) const {
    double correct = 0;
    double all = 0;
    for (std::size_t i = 0; i < held_out_.size(); ++i) {
      const at::Tensor output = evaluation.outputs[i].toTensor();
      correct += sums()->right_sums(held_out_[i], output);
      all += static_cast<double>(output.size(0));
    }
    return correct / all;
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
      last_evaluation_ = evaluation;
    };
    events.saved = [&](std::int64_t step, const std::string& path) {
      progress->print("step " + std::to_string(step) + ": checkpoint " + path);
    };
    return events;
  }

  // Prints the statistics of the run and writes the timeline. All processes call it.
  void summarize(Trainer& trainer, std::optional<Progress>& progress) {
    const std::vector<Record> records = trainer.records();
    const std::vector<RankMemory> memory = trainer.memory();
    Costs costs = trainer.costs(records);
    if (!progress || records.empty()) return;
    for (RankCosts& rank : costs.ranks) rank.capacity = parse_bytes(options_.memory).value_or(0);
    const std::string page = path("timeline.html");
    write_timeline(page, trainer, records, memory, costs, *progress);
    write_output(path("costs.json"), [&](std::ostream& out) { out << to_json(costs); });
    print_statistics(trainer, records, memory, setup_.data->unit(), *progress);
    progress->print("timeline     " + page + "\n");
  }

  // Prints sums, or a sample of text. All processes call it.
  void print_sample(Trainer& trainer, std::optional<Progress>& progress) {
    std::string sample;
    const bool is_text = options_.is_gpt() && sums() == nullptr;
    if (is_text)
      sample = generate_text(trainer.generation_pipeline(), options_.length, "", {.seed = options_.run.seed});
    if (!progress) return;
    if (sums() != nullptr) print_sums(*sums(), held_out_, last_evaluation_, accuracy_, *progress);
    if (is_text) progress->print("Sample:\n" + sample);
  }

  const TrainOptions& options_;
  const DeviceList& devices_;
  nlohmann::json configuration_;
  TrainSetup setup_;
  std::vector<Batch> held_out_;
  std::shared_ptr<Transport> transport_;
  double accuracy_ = 0;
  Trainer::Evaluation last_evaluation_;
};

int train(const TrainOptions& options, const nlohmann::json& configuration) {
  // A write beyond the limit of file sizes fails with an error, like one on a full disk.
  std::signal(SIGXFSZ, SIG_IGN);
  const DeviceList devices = options.run.load_devices(/*are_launched=*/is_in_rank_environment());
  if (!devices.is_cpu() && !options.memory.empty()) {
    throw std::runtime_error("--memory predicts the memory of ranks on the CPU, and not of devices; found --device " +
                             devices.text() + ".\n  Hint: leave --memory out; --dry-run measures two steps.");
  }
  const std::chrono::milliseconds timeout = options.run.timeout_in_milliseconds();
  const auto as_rank = [&] {
    const std::shared_ptr<Transport> transport =
        options.run.connect(devices, options.shared_by_ranks(configuration, devices));
    const Agreement agreement(transport.get(), timeout);
    std::optional<Run> run;
    agreement.fail_together([&] { run.emplace(options, configuration, devices, transport); });
    return run->train(agreement);
  };
  if (LocalRanks::is_rank()) {
    LocalRanks::run([&](const fs::path&, int) {
      const int code = as_rank();
      if (code != kSuccess) std::exit(code);
    });
  }
  if (is_in_rank_environment()) return as_rank();
  Run run(options, configuration, devices, nullptr);
  if (options.run.transport == "threads") return run.train(Agreement(nullptr, timeout));
  LocalRanks ranks(run.ranks_needed());
  try {
    ranks.wait(Clock::now() + std::chrono::hours(24 * 365));
  } catch (const std::runtime_error&) {
    if (interruptions() > 0) return interruption_code();
    throw;
  }
  return kSuccess;
}

}  // namespace

void add_train(CLI::App& command, int& exit) {
  const auto options = std::make_shared<TrainOptions>();
  options->add_to(command);
  on_call(command, [options, &command, &exit] {
    options->read_config(command);
    options->require_consistent(command);
    options->cut.limits.apply();
    exit = train(*options, options->resolved(command));
  });
}

}  // namespace penstock::internal::cli
