#include "penstock/cli/train/progress.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <sstream>
#include <stdexcept>

#include "penstock/schedule/costs.h"

namespace penstock::cli {
namespace {

using nlohmann::json;

std::string clock(double seconds) {
  const auto whole = static_cast<std::int64_t>(seconds + 0.5);
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%lld:%02lld", static_cast<long long>(whole / 60),
                static_cast<long long>(whole % 60));
  return text.data();
}

}  // namespace

std::string short_number(double number) {
  constexpr std::array units{"", " k", " M", " G", " T"};
  std::size_t unit = 0;
  for (; number >= 1000 && unit + 1 < units.size(); ++unit) number /= 1000;
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(),
                unit == 0 || number >= 100 ? "%.0f%s"
                : number >= 10             ? "%.1f%s"
                                           : "%.2f%s",
                number, units[unit]);
  return text.data();
}

Progress::Progress(const std::string& metrics, std::int64_t first, std::int64_t steps, std::string unit)
    : metrics_path_(metrics),
      steps_(steps),
      unit_(std::move(unit)),
      terminal_(::isatty(STDOUT_FILENO) == 1),
      first_(first) {
  std::string kept;
  if (first > 0) {
    std::ifstream in(metrics);
    for (std::string line; std::getline(in, line);) {
      const json parsed = json::parse(line, nullptr, /*allow_exceptions=*/false);
      if (!parsed.is_object() || parsed.value("step", first + 1) > first) continue;
      kept += line + "\n";
      if (parsed.contains("loss") && parsed["loss"].is_number()) losses_.push_back(parsed["loss"].get<double>());
    }
  }
  metrics_.open(metrics, std::ios::trunc);
  metrics_ << kept;
  if (!metrics_.flush()) throw std::runtime_error(metrics + ": could not be written.");
}

Progress::~Progress() {
  clear_line();
}

void Progress::clear_line() {
  if (!has_line_) return;
  std::cout << "\r\x1b[K" << std::flush;
  has_line_ = false;
}

void Progress::write_metrics(const std::string& line) {
  metrics_ << line << "\n";
  if (!metrics_.flush()) throw std::runtime_error(metrics_path_ + ": could not be written.");
}

void Progress::stepped(const StepReport& report) {
  if (report.skipped.empty()) losses_.push_back(report.loss);
  rates_.push_back(static_cast<double>(report.size) / report.seconds);
  json memory = json::array();
  for (const std::int64_t bytes : report.memory) memory.push_back(bytes);
  json line_of_step{{"step", report.step},
                    {"loss", report.loss},
                    {"learning_rate", report.learning_rate},
                    {"gradient_norm", report.gradient_norm},
                    {unit_, report.size},
                    {"seconds", report.seconds},
                    {"bubble", report.bubble},
                    {"memory", memory}};
  // A loss that is not finite is null in JSON.
  if (!report.skipped.empty()) line_of_step["skipped"] = report.skipped;
  write_metrics(line_of_step.dump());
  if (!report.skipped.empty()) {
    ++skipped_;
    say("skipped " + report.skipped);
    return;
  }
  constexpr std::int64_t kLines = 20;
  const bool is_told = terminal_ || report.step == first_ + 1 || report.step == steps_ ||
                       report.step % std::max<std::int64_t>(1, steps_ / kLines) == 0;
  if (!is_told) return;
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began_).count();
  const double left = seconds / static_cast<double>(report.step - first_) * static_cast<double>(steps_ - report.step);
  std::string by_rank;
  for (const std::int64_t bytes : report.memory) {
    by_rank += (by_rank.empty() ? "" : " + ") + short_number(static_cast<double>(bytes)) + "B";
  }
  std::array<char, 256> line{};
  std::snprintf(line.data(), line.size(), "step %*lld/%lld   loss %.4f   %s %s/s   bubble %2.0f %%   %s   %s left",
                static_cast<int>(std::to_string(steps_).size()), static_cast<long long>(report.step),
                static_cast<long long>(steps_), report.loss, short_number(rates_.back()).c_str(), unit_.c_str(),
                100 * report.bubble, by_rank.c_str(), clock(left).c_str());
  if (terminal_) {
    std::cout << "\r\x1b[K" << line.data() << std::flush;
    has_line_ = true;
  } else {
    std::cout << line.data() << std::endl;
  }
}

void Progress::evaluated(std::int64_t step, double loss, const std::string& figure, double value) {
  json line = {{"step", step}, {"eval_loss", loss}};
  if (!figure.empty()) line[figure] = value;
  write_metrics(line.dump());
  std::ostringstream text;
  text.precision(4);
  text << "step " << step << ": held out, loss " << loss;
  if (!figure.empty()) text << ", " << figure << " " << 100 * value << " %";
  say(text.str());
}

void Progress::say(const std::string& line) {
  clear_line();
  std::cout << line << std::endl;
}

double Progress::units_per_second() const {
  return median(rates_);
}

}  // namespace penstock::cli
