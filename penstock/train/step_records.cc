#include "penstock/train/step_records.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <utility>

namespace penstock::internal {
namespace {

// Number of fields of an ActionRecord, which are sent as int64.
constexpr std::int64_t kFields = 9;

}  // namespace

void StepRecords::add(Record record) {
  records_.push_back(std::move(record));
  if (records_.size() > capacity_) records_.pop_front();
}

std::vector<Record> StepRecords::gather(const Schedule& schedule, const TrainingProcesses& processes) const {
  std::vector<Record> records(records_.begin(), records_.end());
  if (processes.are_threads() || records.empty()) return records;
  const auto steps = static_cast<std::int64_t>(records.size());
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    const std::size_t count = schedule.actions(rank).size();
    const at::Tensor numbers = at::zeros({steps, static_cast<std::int64_t>(count), kFields}, at::kLong);
    auto fields = numbers.accessor<std::int64_t, 3>();
    for (std::int64_t step = 0; step < steps && processes.index() == rank; ++step) {
      const auto& actions = records[static_cast<std::size_t>(step)][static_cast<std::size_t>(rank)];
      for (std::size_t i = 0; i < std::min(actions.size(), count); ++i) {
        auto row = fields[step][static_cast<std::int64_t>(i)];
        row[0] = actions[i].start;
        row[1] = actions[i].end;
        row[2] = actions[i].waited;
        row[3] = actions[i].bytes;
        row[4] = actions[i].peer;
        row[5] = actions[i].allocated;
        row[6] = actions[i].peak_allocated;
        row[7] = actions[i].transfer_start;
        row[8] = actions[i].transfer_end;
      }
    }
    processes.broadcast(numbers, rank);
    for (std::int64_t step = 0; step < steps; ++step) {
      auto& actions = records[static_cast<std::size_t>(step)][static_cast<std::size_t>(rank)];
      actions.resize(count);
      for (std::size_t i = 0; i < count; ++i) {
        const auto row = fields[step][static_cast<std::int64_t>(i)];
        actions[i] = {.start = row[0],
                      .end = row[1],
                      .waited = row[2],
                      .bytes = row[3],
                      .peer = static_cast<int>(row[4]),
                      .allocated = row[5],
                      .peak_allocated = row[6],
                      .transfer_start = row[7],
                      .transfer_end = row[8]};
      }
    }
  }
  for (Record& record : records) record = with_common_clock(schedule, std::move(record));
  return records;
}

}  // namespace penstock::internal
