// What a run says while it goes on: a line that is written anew in a terminal, and now and then a line elsewhere; and
// metrics.jsonl, a line of JSON for each step and evaluation.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "penstock/cli/train/metrics.h"
#include "penstock/cli/train/numbers.h"
#include "penstock/train/trainer.h"

namespace penstock::cli {

class Progress {
 public:
  // `first` steps have been done before; lines of later ones are removed from the metrics. A line of progress is printed
  // every `log_every` steps; 0 for about twenty in all. Throws std::runtime_error if the file cannot be written.
  Progress(const std::string& metrics, std::int64_t first, std::int64_t steps, std::int64_t log_every, std::string unit,
           std::chrono::steady_clock::time_point began);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void stepped(const StepReport& report);
  // With a figure of its own, such as the accuracy; none for an empty name.
  void evaluated(std::int64_t step, const Trainer::Evaluation& evaluation, const std::string& figure = {},
                 double value = 0);
  // A line of its own.
  void say(const std::string& line);

  const std::vector<double>& losses() const { return losses_; }
  // Returns the median over the steps of this run.
  double units_per_second() const;
  // Number of steps of this run that were skipped.
  std::int64_t skipped() const { return skipped_; }

 private:
  void clear_line();

  MetricsFile metrics_;
  std::int64_t steps_;
  std::int64_t log_every_;
  // In a terminal, the lines of --log-every stay.
  bool leaves_lines_;
  std::string unit_;
  bool terminal_;
  bool has_line_ = false;
  std::chrono::steady_clock::time_point began_;
  std::int64_t first_;
  std::int64_t skipped_ = 0;
  std::vector<double> losses_;
  std::vector<double> rates_;
};

}  // namespace penstock::cli
