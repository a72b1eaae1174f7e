// Records of the last training steps, gathered from all processes on one clock.
#pragma once

#include <cstddef>
#include <deque>
#include <vector>

#include "penstock/runtime/record.h"
#include "penstock/schedule/schedule.h"
#include "penstock/train/training_processes.h"

namespace penstock::internal {

class StepRecords {
 public:
  // `capacity` is the number of steps that are remembered.
  explicit StepRecords(std::size_t capacity) : capacity_(capacity) {}

  void add(Record record);
  // Returns this process's record of the last step, or null if there was no step.
  const Record* last() const { return records_.empty() ? nullptr : &records_.back(); }

  // Returns the records of all ranks of the first replica, oldest step first. A collective: all processes call it.
  std::vector<Record> gather(const Schedule& schedule, const TrainingProcesses& processes) const;

 private:
  std::size_t capacity_;
  std::deque<Record> records_;
};

}  // namespace penstock::internal
