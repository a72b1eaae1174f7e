#include "penstock/cli/train/setup.h"

#include <cstdint>
#include <stdexcept>
#include <utility>

#include "penstock/cli/program/model_files.h"

namespace penstock::internal::cli {

TrainSetup set_up(const TrainOptions& options, int replicas) {
  options.run.require_valid();
  TrainSetup setup;
  RunOptions run = options.run;
  run.ranks = options.ranks_wanted();
  const std::uint64_t seed = run.seed;
  const std::optional<WeightFiles> weights = options.weights.read();
  int stages = 0;
  if (options.is_gpt()) {
    GptOptions gpt = options.gpt;
    gpt.autocast = options.autocast();
    if (!run.recomputes("none") && !run.recomputes("stages")) {
      gpt.recomputed = run.recomputes("all") ? gpt.blocks() : run.recompute;
    }
    if (options.data.empty()) {
      auto sums = std::make_unique<AdditionData>(options.digits, options.rows, seed);
      gpt.length = sums->length();
      setup.data = std::move(sums);
    } else {
      gpt.length = options.length;
      setup.data = std::make_unique<TextData>(options.data, options.length, options.rows, seed);
    }
    stages = options.cut.stages > 0 ? options.cut.stages : run.stages_wanted();
    if (!options.cut.at.empty())
      throw std::runtime_error("--at is an option of exported models.\n  Hint: cut a GPT with --stages N.");
    for (int i = 0; i < replicas; ++i) setup.replicas.push_back(gpt_model(gpt, seed, stages, weights));
  } else {
    if (options.data.empty()) {
      throw std::runtime_error("--data is missing: " + options.cut.model +
                               " needs batches to train on.\n  Hint: --data DIR names a directory of safetensors "
                               "files with args.0, kwargs.mask, …, and target.");
    }
    for (int i = 0; i < replicas; ++i) {
      Program program = read_program(options.cut, weights);
      options.initial_values.apply(program, seed);
      program.train();
      program.set_autocast(options.autocast());
      run.recompute_modules(program);
      if (i == 0) setup.program = std::make_unique<Program>(program);
      Pipe pipe = options.cut.cut(program, run.stages_wanted());
      stages = pipe.num_stages();
      setup.replicas.push_back(program_model(std::move(pipe)));
    }
    setup.data = batch_files(
        options.data, *setup.program,
        {.loss = options.loss, .ignore_index = options.ignore_index, .seed = seed, .shuffle = options.shuffle});
  }
  setup.schedule = make_schedule(options, stages);
  return setup;
}

Schedule make_schedule(const TrainOptions& options, int stages) {
  constexpr int kMicrobatchesPerRank = 4;
  RunOptions run = options.run;
  run.ranks = options.ranks_wanted();
  const Schedule probe = run.make(stages, /*available=*/0);
  if (run.microbatches > 0 || !run.csv.empty()) return probe;
  return run.make(stages, kMicrobatchesPerRank * probe.ranks());
}

void require_splittable(const TrainSetup& setup, const TrainOptions& options, bool between_processes) {
  setup.data->check({.replicas = options.data_parallel,
                     .eval_replicas = between_processes ? 1 : options.data_parallel,
                     .microbatches = setup.schedule->microbatches()});
}

}  // namespace penstock::internal::cli
