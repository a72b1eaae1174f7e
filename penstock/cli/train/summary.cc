#include "penstock/cli/train/summary.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <iostream>

#include "penstock/base/text.h"
#include "penstock/cli/output.h"
#include "penstock/schedule/draw.h"
#include "penstock/schedule/generators.h"

namespace penstock::internal::cli {
namespace {

std::string percent(double part) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.1f %%", 100 * part);
  return text.data();
}

}  // namespace

std::string memory_text(const RankMemory& memory) {
  return concat(bytes_text(static_cast<double>(memory.measured)), " measured, ",
                memory.predicted > 0 ? concat(bytes_text(static_cast<double>(memory.predicted)), " predicted")
                                     : std::string("not predicted on devices"));
}

void print_introduction(const Trainer& trainer, const TrainOptions& options, const TrainSetup& setup,
                        const std::string& kind) {
  const Schedule& schedule = *setup.schedule;
  std::cout << (options.is_gpt() ? trainer.model().description() : options.cut.model) << "\n"
            << setup.data->description() << "\n"
            << schedule.stages() << (schedule.stages() == 1 ? " stage" : " stages") << " on " << schedule.ranks()
            << (schedule.ranks() == 1 ? " rank" : " ranks") << " (" << kind << "), "
            << (options.run.csv.empty() ? std::string(find_generator(options.run.schedule).name) : options.run.csv)
            << ", " << schedule.microbatches() << " microbatches";
  if (options.data_parallel > 1) {
    std::cout << ", " << options.data_parallel << (options.shard ? " replicas, sharded" : " replicas");
  }
  std::cout << "\n";
  if (trainer.steps_done() > 0) {
    std::cout << "resuming after step " << trainer.steps_done() << "\n";
  } else if (!options.weights.path.empty()) {
    std::cout << "initial weights: " << options.weights.path << "\n";
  }
  std::cout << std::endl;
}

void write_timeline(const std::string& path, Trainer& trainer, const std::vector<Record>& records,
                    const std::vector<RankMemory>& memory, const Costs& costs, const Progress& progress) {
  const Schedule& schedule = trainer.pipeline().schedule();
  Timeline measured = timeline_of(schedule, records.back());
  Timeline simulated = simulate_records(schedule, records);
  // Under PyTorch's own profiler nothing is measured here, and the page shows the cost model.
  add_memory(schedule, costs, measured);
  // The cost model has no activations on devices.
  const bool is_predicted = std::ranges::any_of(memory, [](const RankMemory& rank) { return rank.predicted > 0; });
  if (is_predicted) add_memory(schedule, costs, simulated);
  // The peak of the whole run includes the optimizer step.
  for (std::size_t rank = 0; rank < memory.size(); ++rank) {
    RankTimes& times = measured.ranks[rank];
    if (!times.memory.empty()) times.peak_bytes = static_cast<double>(memory[rank].measured);
  }
  const std::vector<double>& losses = progress.losses();
  write_output(path, [&](std::ostream& out) {
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
}

void print_statistics(Trainer& trainer, const std::vector<Record>& records, const std::vector<RankMemory>& memory,
                      const std::string& unit, Progress& progress) {
  const Schedule& schedule = trainer.pipeline().schedule();
  std::vector<double> bubbles;
  for (const Record& record : records) bubbles.push_back(timeline_of(schedule, record).bubble);
  std::string text = concat("\nthroughput   ", short_number(progress.units_per_second()), " ", unit,
                            "/s\nbubble       ", percent(median(bubbles)), " measured, ",
                            percent(simulate_records(schedule, records).bubble), " simulated");
  for (std::size_t rank = 0; rank < memory.size(); ++rank) {
    text += concat(rank == 0 ? "\nmemory       rank " : "\n             rank ", rank, ": ", memory_text(memory[rank]));
  }
  if (progress.skipped() > 0) {
    text += concat("\nskipped      ", progress.skipped(), " of ", progress.steps(),
                   " steps, whose loss or gradients were not finite");
  }
  progress.print(text);
}

void print_sums(const AdditionData& data, const std::vector<Batch>& held_out, const Trainer::Evaluation& evaluation,
                double accuracy, Progress& progress) {
  constexpr std::int64_t kShown = 6;
  std::int64_t count = 0;
  for (const Batch& batch : held_out) count += batch.args[0].toTensor().size(0);
  std::string text = concat("Accuracy on ", count, " held-out sums: ", percent(accuracy), "\n");
  const at::Tensor output = evaluation.outputs.front().toTensor();
  const Batch& batch = held_out.front();
  for (std::int64_t row = 0; row < std::min(kShown, output.size(0)); ++row) {
    const Batch single{.args = {batch.args[0].toTensor().narrow(0, row, 1)},
                       .kwargs = {},
                       .target = batch.target.toTensor().narrow(0, row, 1)};
    const bool is_correct = data.right_sums(single, output.narrow(0, row, 1)) == 1;
    text += concat("  ", data.written(batch, output, row), is_correct ? "" : "   wrong", "\n");
  }
  progress.print(text);
}

}  // namespace penstock::internal::cli
