// metrics.jsonl: a line of JSON for each step and evaluation of a run. The file is appended to, and never rewritten in
// place.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace penstock::cli {

class MetricsFile {
 public:
  // Continues the file of a run that has done `step` steps: lines of later steps, and a line that a killed process has
  // left unfinished, are removed by writing the others aside and renaming. Throws std::runtime_error, which names the
  // file.
  MetricsFile(std::string path, std::int64_t step);
  ~MetricsFile();
  MetricsFile(const MetricsFile&) = delete;
  MetricsFile& operator=(const MetricsFile&) = delete;

  // Appends a line, in one write. Throws std::runtime_error.
  void write(const std::string& line);

  // Losses of the steps that the file had; NaN where one was not finite.
  const std::vector<double>& losses() const { return losses_; }
  // Number of lines that the constructor removed.
  std::int64_t removed() const { return removed_; }

 private:
  void cut(std::int64_t step);

  std::string path_;
  std::vector<double> losses_;
  std::int64_t removed_ = 0;
  int file_ = -1;
};

}  // namespace penstock::cli
