// Prints a description of a training run at its start, and its statistics at its end.
#pragma once

#include <string>
#include <vector>

#include "penstock/cli/train/options.h"
#include "penstock/cli/train/progress.h"
#include "penstock/cli/train/setup.h"
#include "penstock/runtime/record.h"
#include "penstock/train/data.h"
#include "penstock/train/trainer.h"

namespace penstock::internal::cli {

// Prints model, data, stages, ranks and schedule, and the checkpoint or weights that the run starts from. `kind` is
// that of the ranks: "threads", "processes", "threads, sim:0,1".
void print_introduction(const Trainer& trainer, const TrainOptions& options, const TrainSetup& setup,
                        const std::string& kind);

// Writes the interactive timeline of the last step, measured and simulated, with the curve of the loss. `records` are
// those of the last steps, `memory` is that of the ranks.
void write_timeline(const std::string& path, Trainer& trainer, const std::vector<Record>& records,
                    const std::vector<RankMemory>& memory, const Costs& costs, const Progress& progress);

// Returns "4.13 MB measured, 4.02 MB predicted".
std::string memory_text(const RankMemory& memory);

// Prints throughput, bubble, memory by rank, and the number of skipped steps. `unit` is what throughput counts: "rows".
void print_statistics(Trainer& trainer, const std::vector<Record>& records, const std::vector<RankMemory>& memory,
                      const std::string& unit, Progress& progress);

// Prints the accuracy on held-out sums, and some of them with the model's answers.
void print_sums(const AdditionData& data, const std::vector<Batch>& held_out, const Trainer::Evaluation& evaluation,
                double accuracy, Progress& progress);

}  // namespace penstock::internal::cli
