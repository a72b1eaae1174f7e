#include "penstock/cli/train/progress.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <sstream>
#include <stdexcept>

#include "penstock/base/text.h"
#include "penstock/cli/terminal.h"
#include "penstock/schedule/costs.h"

namespace penstock::internal::cli {
namespace {

using nlohmann::json;

}  // namespace

Progress::Progress(const std::string& metrics, std::int64_t first, std::int64_t steps, std::int64_t log_every,
                   std::string unit, std::chrono::steady_clock::time_point began)
    : metrics_(metrics, first),
      steps_(steps),
      log_every_(log_every > 0 ? log_every : std::max<std::int64_t>(1, steps / 20)),
      keeps_lines_(log_every > 0),
      unit_(std::move(unit)),
      terminal_(::isatty(STDOUT_FILENO) == 1),
      began_(began),
      first_(first),
      losses_(metrics_.losses()) {
  if (metrics_.removed() > 0) {
    print(concat(metrics, ": removed ", metrics_.removed(), metrics_.removed() == 1 ? " line" : " lines",
                 " after step ", first));
  }
}

Progress::~Progress() {
  clear_line();
}

void Progress::clear_line() {
  if (!has_line_) return;
  erase_line();
  has_line_ = false;
}

void Progress::stepped(const StepReport& report) {
  losses_.push_back(report.loss);
  rates_.push_back(static_cast<double>(report.size) / report.seconds);
  json memory = json::array();
  for (const std::int64_t bytes : report.memory) memory.push_back(bytes);
  json step_metrics{{"step", report.step},
                    {"loss", report.loss},
                    {"learning_rate", report.learning_rate},
                    {"gradient_norm", report.gradient_norm},
                    {unit_, report.size},
                    {"seconds", report.seconds},
                    {"bubble", report.bubble},
                    {"memory", memory}};
  if (report.loss_scale) step_metrics["loss_scale"] = *report.loss_scale;
  // JSON has null for a loss that is not finite.
  if (!report.skipped.empty()) step_metrics["skipped"] = report.skipped;
  metrics_.write(step_metrics.dump());
  if (!report.skipped.empty()) {
    ++skipped_;
    print("skipped " + report.skipped);
    return;
  }
  const bool is_printed =
      terminal_ || report.step == first_ + 1 || report.step == steps_ || report.step % log_every_ == 0;
  if (!is_printed) return;
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began_).count();
  const double left = seconds / static_cast<double>(report.step - first_) * static_cast<double>(steps_ - report.step);
  std::string by_rank;
  for (const std::int64_t bytes : report.memory) {
    by_rank += (by_rank.empty() ? "" : " + ") + bytes_text(static_cast<double>(bytes));
  }
  std::array<char, 256> line{};
  std::snprintf(line.data(), line.size(), "step %*lld/%lld   loss %.4f   %s %s/s   bubble %2.0f %%   %s   %s left",
                static_cast<int>(std::to_string(steps_).size()), static_cast<long long>(report.step),
                static_cast<long long>(steps_), report.loss, short_number(rates_.back()).c_str(), unit_.c_str(),
                100 * report.bubble, by_rank.c_str(), clock_text(left).c_str());
  if (terminal_) {
    erase_line();
    std::cout << line.data() << std::flush;
    has_line_ = true;
    if (keeps_lines_ && report.step % log_every_ == 0) {
      std::cout << std::endl;
      has_line_ = false;
    }
  } else {
    std::cout << line.data() << std::endl;
  }
}

void Progress::evaluated(std::int64_t step, const Trainer::Evaluation& evaluation, const std::string& metric,
                         double value) {
  json line = {{"step", step}, {"eval_loss", evaluation.loss}};
  if (!metric.empty()) line[metric] = value;
  metrics_.write(line.dump());
  if (!evaluation.nonfinite.empty()) return print(evaluation.nonfinite);
  std::ostringstream text;
  text.precision(4);
  text << "step " << step << ": evaluation loss " << evaluation.loss;
  if (!metric.empty()) text << ", " << metric << " " << 100 * value << " %";
  print(text.str());
}

void Progress::print(const std::string& line) {
  clear_line();
  std::cout << line << std::endl;
}

double Progress::units_per_second() const {
  return median(rates_);
}

}  // namespace penstock::internal::cli
