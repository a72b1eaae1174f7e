#include "penstock/train/step_statistics.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>

#include "penstock/runtime/record.h"
#include "penstock/schedule/simulate.h"

namespace penstock::internal {

void StepStatistics::add_time(const Pipeline& pipeline) {
  for (int local = 0; local < pipeline.replicas(); ++local) {
    const Record& record = pipeline.record(local);
    const Timeline timeline = timeline_of(pipeline.recorded_schedule(), record);
    for (std::size_t rank = 0; rank < record.size(); ++rank) {
      // Ranks of other processes have no record here.
      if (record[rank].empty()) continue;
      compute_time += timeline.ranks[rank].work;
      total_time += timeline.makespan;
    }
  }
}

void StepStatistics::sum_over(const TrainingProcesses& processes) {
  std::vector<double*> numbers;
  for (std::vector<double>* values : {&losses, &gradient_squares, &memory, &stop_codes}) {
    for (double& value : *values) numbers.push_back(&value);
  }
  for (double* time : {&compute_time, &total_time}) numbers.push_back(time);
  processes.sum_in_place(numbers);
}

void StepStatistics::write_to(StepReport& report, const StepBatches& batches, double unscale) const {
  double sum = 0;
  std::size_t next = 0;
  for (const std::vector<MicrobatchShare>& shares : batches.shares) {
    for (const MicrobatchShare& share : shares) sum += share.weight * losses[next++];
  }
  report.loss = sum / batches.weight;
  report.gradient_norm = unscale * std::sqrt(std::accumulate(gradient_squares.begin(), gradient_squares.end(), 0.0));
  report.bubble = total_time > 0 ? 1 - compute_time / total_time : 0;
  const auto stop = std::ranges::find_if(stop_codes, [](double code) { return code != 0; });
  if (stop != stop_codes.end()) report.stop_code = static_cast<int>(*stop);
  for (const double bytes : memory) report.memory.push_back(static_cast<std::int64_t>(bytes));
}

}  // namespace penstock::internal
