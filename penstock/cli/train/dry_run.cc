#include "penstock/cli/train/dry_run.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <iostream>
#include <string>
#include <vector>

#include "penstock/cli/train/numbers.h"
#include "penstock/cli/train/summary.h"
#include "penstock/runtime/record.h"

namespace penstock::internal::cli {
namespace {

std::string seconds_text(double seconds) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.3g s", seconds);
  return text.data();
}

}  // namespace

void dry_run(Trainer& trainer, const std::vector<Batch>& held_out, const TrainOptions& options) {
  if (!held_out.empty()) trainer.evaluate({held_out.front()});
  const std::int64_t left = options.steps - trainer.steps_done();
  // The first step includes work that is done once, such as exchanging shapes.
  StepReport report = trainer.step();
  if (left > 1) report = trainer.step();
  const std::vector<Record> records = trainer.records();
  const std::vector<RankMemory> memory = trainer.memory();
  const std::vector<StageSize> sizes = trainer.stage_sizes();
  const std::int64_t checkpoint = trainer.checkpoint_bytes();
  if (!trainer.is_coordinator()) return;

  const Schedule& schedule = trainer.pipeline().schedule();
  const Timeline simulated = simulate_records(schedule, records);
  for (std::size_t stage = 0; stage < sizes.size(); ++stage) {
    std::cout << (stage == 0 ? "stages       stage " : "             stage ") << stage << " on rank "
              << schedule.placement().rank_of(static_cast<int>(stage)) << ": " << sizes[stage].parameters
              << (sizes[stage].parameters == 1 ? " parameter, " : " parameters, ")
              << short_number(static_cast<double>(sizes[stage].elements)) << " elements\n";
  }
  std::array<char, 64> bubble{};
  std::snprintf(bubble.data(), bubble.size(), "%.1f %% measured, %.1f %% simulated", 100 * report.bubble,
                100 * simulated.bubble);
  std::cout << "bubble       " << bubble.data() << "\n";
  for (std::size_t rank = 0; rank < memory.size(); ++rank) {
    std::cout << (rank == 0 ? "memory       rank " : "             rank ") << rank << ": " << memory_text(memory[rank])
              << "\n";
  }
  std::cout << "time         " << seconds_text(report.seconds) << " per step, about "
            << clock_text(report.seconds * static_cast<double>(left)) << " for " << left
            << (left == 1 ? " step\n" : " steps\n");
  if (!options.checkpoint.empty()) {
    std::cout << "checkpoint   " << bytes_text(static_cast<double>(checkpoint)) << " each; the last " << options.keep
              << " are kept\n";
  }
  std::cout << "Nothing was written." << std::endl;
}

}  // namespace penstock::internal::cli
