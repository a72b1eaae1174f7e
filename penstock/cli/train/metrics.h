// metrics.jsonl: one line of JSON for each step and each evaluation of a run.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace penstock::internal::cli {

// Appends lines to the file, each with a single write, so that a killed process leaves at most one incomplete line.
class MetricsFile {
 public:
  // Opens the file of a run that has done `step` steps. Lines of later steps and an incomplete line are removed, by
  // atomic replacement of the file. Throws std::runtime_error, which names the file.
  MetricsFile(std::string path, std::int64_t step);
  ~MetricsFile();
  MetricsFile(const MetricsFile&) = delete;
  MetricsFile& operator=(const MetricsFile&) = delete;

  // Appends a line. Throws std::runtime_error.
  void write(const std::string& line);

  // Losses of the steps already in the file; NaN for one that was not finite.
  const std::vector<double>& losses() const { return losses_; }
  // Number of lines that the constructor removed.
  std::int64_t removed() const { return removed_; }

 private:
  void truncate_after(std::int64_t step);

  std::string path_;
  std::vector<double> losses_;
  std::int64_t removed_ = 0;
  int file_ = -1;
};

}  // namespace penstock::internal::cli
