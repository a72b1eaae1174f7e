#include "penstock/cli/train/memory_limit.h"

#include <cstddef>
#include <cstdint>
#include <iostream>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "penstock/base/text.h"
#include "penstock/cli/byte_units.h"
#include "penstock/cli/train/memory_trial.h"
#include "penstock/cli/train/numbers.h"
#include "penstock/schedule/error.h"
#include "penstock/schedule/generators.h"
#include "penstock/train/optimizer.h"
#include "penstock/transport/transport.h"

namespace penstock::internal::cli {
namespace {

// Returns the need of the rank that needs most under any schedule. No weights are loaded for it.
RankNeed static_need(const TrainOptions& options, const TrainSetup& setup) {
  RankNeed worst;
  for (int rank = 0; rank < setup.schedule->ranks(); ++rank) {
    const WeightBytes of_rank = setup.replicas.front()->weight_bytes(setup.schedule->placement().stages_of(rank));
    // Gradients of earlier batches stay until a step has succeeded.
    const int gradients = options.accumulate > 1 ? 2 : 1;
    const std::int64_t bytes =
        of_rank.weights + gradients * of_rank.gradients + state_bytes(options.optimizer, of_rank.gradients);
    const int shards = options.shard ? options.data_parallel : 1;
    worst = max_of(worst, {.bytes = static_cast<double>(bytes) / shards, .rank = rank});
  }
  return worst;
}

std::runtime_error refusal(const RankNeed& need, const std::string& purpose, const std::string& limit,
                           const std::string& hint) {
  return std::runtime_error(concat("rank ", need.rank, " would need ", bytes_text(need.bytes), " of memory for ",
                                   purpose, ", and --memory allows ", limit, ".\n  Hint: ", hint));
}

// Finds options under which a run would fit: copies of the given ones with one to three of them changed. What a
// microbatch needs with other recomputations or another size is measured by a trial.
class Alternatives {
 public:
  Alternatives(const TrainOptions& options, const TrainSetup& setup, const TrainerOptions& trainer_options,
               const Agreement& agreement, Trial trial)
      : options_(options), setup_(setup), trainer_options_(trainer_options), agreement_(agreement) {
    trials_.emplace(std::pair{options.run.recompute, setup.schedule->microbatches()}, std::move(trial));
  }

  // A collective.
  std::string hint() {
    // Values to try. An empty one leaves the option as it is.
    std::vector<std::string> recompute{""};
    std::vector<std::string> schedules{""};
    std::vector<std::string> microbatches{""};
    if (options_.run.recomputes("none")) recompute = {"stages", "all", ""};
    if (options_.run.csv.empty()) {
      const std::string_view given = find_generator(options_.run.schedule).name;
      schedules.clear();
      for (const Generator& generator : generators()) {
        if (generator.name != given) schedules.emplace_back(generator.name);
      }
      schedules.emplace_back();
      const int count = setup_.schedule->microbatches();
      microbatches = {std::to_string(2 * count), std::to_string(4 * count), ""};
    }
    for (int changes = 1; changes <= 3 && found_.empty(); ++changes) {
      for (const std::string& part : recompute) {
        for (const std::string& name : schedules) {
          for (const std::string& number : microbatches) {
            if (!part.empty() + !name.empty() + !number.empty() == changes) add(part, name, number);
          }
        }
      }
    }
    if (found_.empty()) return "cut the model into more stages on more ranks, or make the batches smaller.";
    return concat("it would fit with ", join(found_, ", or "), ".");
  }

 private:
  void add(const std::string& recompute, const std::string& schedule, const std::string& microbatches) {
    constexpr std::size_t kMost = 6;
    if (found_.size() == kMost) return;
    TrainOptions options = options_;
    std::vector<std::string> words;
    if (!recompute.empty()) {
      options.run.recompute = {recompute};
      words.push_back("--recompute " + recompute);
    }
    if (!schedule.empty()) {
      options.run.schedule = schedule;
      words.push_back("--schedule " + schedule);
    }
    if (!microbatches.empty()) {
      options.run.microbatches = std::stoi(microbatches);
      words.push_back("--microbatches " + microbatches);
    }
    const std::optional<Schedule> made = with_the_same_cut(options);
    if (!made || !features_of(*made).backward) return;
    const std::optional<Trial>& trial = trial_of(options.run.recompute, made->microbatches());
    if (!trial) return;
    const RankNeed need = need_of(*made, *trial);
    if (need.bytes <= *parse_bytes(options_.memory)) {
      found_.push_back(concat(join(words, " "), " (", bytes_text(need.bytes), ")"));
    }
  }

  // Returns the schedule that a run with these options has; none if it would cut or place the model otherwise.
  std::optional<Schedule> with_the_same_cut(const TrainOptions& options) const {
    const int stages = setup_.schedule->stages();
    const bool is_cut_by_options =
        options.cut.stages > 0 || !options.cut.at.empty() || (setup_.program && !setup_.program->graph().marks.empty());
    RunOptions run = options.run;
    run.ranks = options.ranks_wanted();
    if (!is_cut_by_options && run.stages_wanted() != stages) return std::nullopt;
    try {
      const Schedule made = make_schedule(options, stages);
      if (made.ranks() == setup_.schedule->ranks()) return made;
    } catch (const std::runtime_error&) {
      // The schedule has another number of stages per rank.
    }
    return std::nullopt;
  }

  // Returns what a trial with the run's own schedule has measured; none if the model has nothing of that kind to
  // recompute or refuses to be recomputed so, or its batches cannot be split so.
  const std::optional<Trial>& trial_of(const std::vector<std::string>& recompute, int microbatches) {
    const auto [entry, is_new] = trials_.try_emplace(std::pair{recompute, microbatches});
    std::optional<Trial>& trial = entry->second;
    if (!is_new) return trial;
    TrainOptions options = options_;
    options.run.recompute = recompute;
    options.run.microbatches = microbatches;
    if (trainer_options_.transport == nullptr || trainer_options_.transport->rank() == 0) {
      std::cerr << "note: --memory is too small; measuring a microbatch of a batch of " << microbatches
                << " microbatches with --recompute " << join(recompute, " ") << ".\n";
    }
    try {
      trial = run_trial(options, trainer_options_, agreement_);
    } catch (const TransportError&) {
      // The ranks do not agree any more on what to try next.
      throw;
    } catch (const std::exception&) {
      // Every rank fails so.
    }
    return trial;
  }

  const TrainOptions& options_;
  const TrainSetup& setup_;
  const TrainerOptions& trainer_options_;
  const Agreement& agreement_;
  // Trials for each value of --recompute and number of microbatches.
  std::map<std::pair<std::vector<std::string>, int>, std::optional<Trial>> trials_;
  std::vector<std::string> found_;
};

}  // namespace

void require_memory(const TrainOptions& options, const TrainSetup& setup, const TrainerOptions& trainer_options,
                    const Agreement& agreement) {
  const double limit = *parse_bytes(options.memory);
  if (features_of(*setup.schedule).communication) {
    throw ScheduleError(
        "--memory needs a schedule without messages, which are added when it is lowered.\n  Hint: give a CSV that was "
        "exported without --lowered.");
  }
  if (const RankNeed need = static_need(options, setup); need.bytes > limit) {
    const bool can_shard = options.data_parallel > 1 && !options.shard;
    throw refusal(need, "its weights, gradients and optimizer state", options.memory,
                  concat("cut the model into more stages on more ranks",
                         can_shard ? ", or shard it over replicas with --shard." : "."));
  }
  Trial trial = run_trial(options, trainer_options, agreement);
  const RankNeed need = need_of(*setup.schedule, trial);
  if (need.bytes <= limit) return;
  throw refusal(need, "its tensors", options.memory,
                Alternatives(options, setup, trainer_options, agreement, std::move(trial)).hint());
}

}  // namespace penstock::internal::cli
