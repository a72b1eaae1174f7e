#include "penstock/cli/train/metrics.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <utility>

#include "penstock/cli/output.h"
#include "penstock/schedule/json.h"

namespace penstock::internal::cli {
namespace {

using nlohmann::json;

[[noreturn]] void fail(const std::string& path) {
  throw std::runtime_error(path + ": could not be written: " + std::generic_category().message(errno) + ".");
}

}  // namespace

MetricsFile::MetricsFile(std::string path, std::int64_t step) : path_(std::move(path)) {
  std::error_code ignored;
  if (std::filesystem::exists(path_, ignored)) truncate_after(step);
  file_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (file_ < 0) fail(path_);
}

MetricsFile::~MetricsFile() {
  if (file_ >= 0) ::close(file_);
}

void MetricsFile::truncate_after(std::int64_t step) {
  const std::string text = read_file(path_);
  std::string kept;
  for (std::string_view rest = text; !rest.empty();) {
    const std::size_t end = rest.find('\n');
    const std::string_view line = rest.substr(0, end);
    const json parsed = try_parse_json(line).value_or(json());
    const bool has_step = parsed.is_object() && parsed.contains("step") && parsed["step"].is_number_integer();
    if (end != std::string_view::npos && has_step && parsed["step"].get<std::int64_t>() <= step) {
      kept.append(line).append("\n");
      // JSON has null for a loss that is not finite.
      if (const auto loss = parsed.find("loss"); loss != parsed.end()) {
        losses_.push_back(loss->is_number() ? loss->get<double>() : std::numeric_limits<double>::quiet_NaN());
      }
    } else {
      ++removed_;
    }
    rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
  }
  if (removed_ > 0) write_output(path_, [&](std::ostream& out) { out << kept; });
}

void MetricsFile::write(const std::string& line) {
  const std::string text = line + "\n";
  for (std::string_view rest = text; !rest.empty();) {
    const ssize_t written = ::write(file_, rest.data(), rest.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) fail(path_);
    rest.remove_prefix(static_cast<std::size_t>(written));
  }
}

}  // namespace penstock::internal::cli
