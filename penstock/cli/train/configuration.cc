// Configuration files: reads them, and writes the options of a run as one.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <sstream>
#include <stdexcept>

#include "penstock/base/nearest.h"
#include "penstock/cli/output.h"
#include "penstock/cli/read_number.h"
#include "penstock/cli/train/options.h"
#include "penstock/schedule/json.h"

namespace penstock::internal::cli {
namespace {

using nlohmann::json;

// Names of the options that are paths to read, and paths to write.
constexpr std::array kInputPaths{"model", "data", "csv", "weights"};
constexpr std::array kOutputPaths{"checkpoint", "output"};
// Options of a single invocation, which a run that is resumed need not repeat.
constexpr std::array kInvocationOptions{"help",      "config", "resume",       "overwrite", "dry-run",
                                        "log-every", "memory", "memory-limit", "time-limit"};

bool contains(const auto& names, const std::string& name) {
  return std::ranges::find(names, name) != names.end();
}

// Returns a value of a configuration file as it is written on the command line.
std::string argument_text(const json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

std::vector<CLI::ConfigItem> read_items(const std::string& path) {
  const std::string text = read_file(path);
  std::vector<CLI::ConfigItem> items;
  if (std::filesystem::path(path).extension() == ".json") {
    const json parsed = [&] {
      try {
        return parse_json(text);
      } catch (const JsonError& error) {
        throw std::runtime_error(path + ": " + error.what());
      }
    }();
    if (!parsed.is_object()) throw std::runtime_error(path + ": is not a JSON object: {\"steps\": 1000, …}.");
    for (const auto& [name, value] : parsed.items()) {
      CLI::ConfigItem item;
      item.name = name;
      if (value.is_array()) {
        for (const json& element : value) item.inputs.push_back(argument_text(element));
      } else if (!value.is_null()) {
        item.inputs.push_back(argument_text(value));
      }
      items.push_back(std::move(item));
    }
    return items;
  }
  std::istringstream in(text);
  return CLI::ConfigTOML().from_config(in);
}

// Returns an argument as a number if it is one, else as a string. Spellings of the same number (.50 and 0.5, 1e3 and
// 1000) give the same value, so that ranks can compare their options.
json number_or_string(const std::string& word) {
  if (const auto number = read_number<std::int64_t>(word)) return *number;
  if (const auto number = read_number<std::uint64_t>(word)) return *number;
  const std::optional<double> number = read_number<double>(word);
  if (!number || !std::isfinite(*number)) return word;
  constexpr double kExact = 1LL << 53;
  if (*number == std::trunc(*number) && std::abs(*number) < kExact) return static_cast<std::int64_t>(*number);
  return *number;
}

// Returns the value of an option as a JSON number, boolean, string or list.
json value_of(const CLI::Option& option, bool is_path) {
  const std::vector<std::string> words = option.count() > 0 ? option.results() : std::vector{option.get_default_str()};
  // A flag may be true by default.
  if (option.get_expected_max() == 0) return option.count() > 0 ? option.as<bool>() : words.front() == "true";
  const auto element_of = [&](const std::string& word) { return is_path ? json(word) : number_or_string(word); };
  if (option.get_expected_max() == 1) return words.empty() ? json() : element_of(words.front());
  json list = json::array();
  for (const std::string& word : words) {
    if (!word.empty() && word != "[]") list.push_back(element_of(word));
  }
  return list;
}

}  // namespace

void TrainOptions::read_config(CLI::App& command) const {
  if (config.empty()) return;
  std::vector<std::string> names;
  for (const CLI::Option* option : command.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back(name);
  }
  for (const CLI::ConfigItem& item : read_items(config)) {
    // CLI11 reports the beginning and end of sections as items.
    if (item.name == "++" || item.name == "--") continue;
    CLI::Option* const option = command.get_option_no_throw(item.name == "model" ? "MODEL.pt2" : "--" + item.name);
    if (option == nullptr || item.name == "config" || item.name == "help") {
      const auto near = nearest(item.name, names);
      throw std::runtime_error(config + ": unknown option '" + item.name + "'." +
                               (near ? "\n  Hint: did you mean " + *near + "?" : ""));
    }
    if (option->count() > 0) continue;
    std::vector<std::string> inputs = item.inputs;
    if (contains(kInputPaths, item.name)) {
      for (std::string& path : inputs) path = (std::filesystem::path(config).parent_path() / path).string();
    }
    try {
      // A flag may be set by its negative name, such as no-shuffle.
      if (option->get_expected_max() == 0 && !inputs.empty()) {
        inputs.front() = option->get_flag_value(item.name, inputs.front());
      }
      option->add_result(inputs);
      option->run_callback();
    } catch (const CLI::Error& error) {
      throw std::runtime_error(config + ": " + error.what());
    }
  }
}

json TrainOptions::resolved(const CLI::App& command) const {
  json all = json::object();
  for (const CLI::Option* option : command.get_options()) {
    const std::string name = option->get_lnames().empty() ? "model" : option->get_lnames().front();
    if (contains(kInvocationOptions, name) || !applies(name)) continue;
    // Leaves out options that are not given and are empty or off by default, but for the seed, whose default 0 is a
    // value.
    const std::string default_text = option->get_default_str();
    const bool is_off = default_text.empty() || default_text == "0" || default_text == "[]" || default_text == "false";
    if (option->count() == 0 && is_off && name != "seed") continue;
    const bool is_path = contains(kInputPaths, name) || contains(kOutputPaths, name);
    all[name] = value_of(*option, is_path);
    if (is_path) all[name] = std::filesystem::absolute(all[name].get<std::string>()).lexically_normal().string();
  }
  return all;
}

RankOptions TrainOptions::shared_by_ranks(const json& configuration, const DeviceList& devices) const {
  // Options that only the coordinator uses or that may differ between processes, those that the transport compares, and
  // options whose defaults depend on the model: the resolved values of the latter are compared later.
  constexpr std::array kNotCompared{"output", "keep", "timeout", "ranks", "microbatches", "device", "device-transport"};
  RankOptions shared;
  for (const auto& [name, value] : configuration.items()) {
    if (contains(kNotCompared, name)) continue;
    const bool is_path = contains(kInputPaths, name) || contains(kOutputPaths, name);
    shared[name] = is_path ? "given" : argument_text(value);
  }
  shared["device (type)"] = device_type_name(devices.type());
  if (resume) shared["resume"] = "given";
  if (dry_run) shared["dry-run"] = "given";
  if (!memory.empty()) shared["memory"] = memory;
  return shared;
}

}  // namespace penstock::internal::cli
