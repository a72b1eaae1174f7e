// Reports the progress of a run: on a terminal, a status line that is updated at each step; elsewhere, a line every few
// steps; and metrics.jsonl.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "penstock/cli/train/metrics.h"
#include "penstock/cli/train/numbers.h"
#include "penstock/train/trainer.h"

namespace penstock::internal::cli {

class Progress {
 public:
  // The run resumes after step `first`; metrics of later steps are removed. Progress is printed every `log_every`
  // steps, or about twenty times in all if it is 0. Throws std::runtime_error if the metrics cannot be written.
  Progress(const std::string& metrics, std::int64_t first, std::int64_t steps, std::int64_t log_every, std::string unit,
           std::chrono::steady_clock::time_point began);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void stepped(const StepReport& report);
  // `metric` names a further metric, such as "accuracy", with its value; it may be empty.
  void evaluated(std::int64_t step, const Trainer::Evaluation& evaluation, const std::string& metric = {},
                 double value = 0);
  // Prints a line above the status line.
  void print(const std::string& line);

  const std::vector<double>& losses() const { return losses_; }
  // Returns the median throughput of the steps of this run.
  double units_per_second() const;
  // Number of the last step.
  std::int64_t steps() const { return steps_; }
  // Number of steps of this run that were skipped.
  std::int64_t skipped() const { return skipped_; }

 private:
  void clear_line();

  MetricsFile metrics_;
  std::int64_t steps_;
  std::int64_t log_every_;
  // True if --log-every is given: on a terminal, the status lines of these steps stay.
  bool keeps_lines_;
  std::string unit_;
  bool terminal_;
  bool has_line_ = false;
  std::chrono::steady_clock::time_point began_;
  std::int64_t first_;
  std::int64_t skipped_ = 0;
  std::vector<double> losses_;
  std::vector<double> rates_;
};

}  // namespace penstock::internal::cli
