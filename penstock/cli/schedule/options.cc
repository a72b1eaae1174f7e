#include "penstock/cli/schedule/options.h"

#include <algorithm>
#include <charconv>
#include <iostream>
#include <sstream>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/cli/checks.h"
#include "penstock/cli/output.h"
#include "penstock/schedule/csv.h"
#include "penstock/schedule/error.h"
#include "penstock/schedule/generators.h"
#include "penstock/schedule/passes.h"

namespace penstock::internal::cli {
namespace {

// Parses a list of numbers such as "0,3".
std::vector<int> numbers(const std::string& text, char separator, const std::string& option,
                         const std::string& example) {
  std::vector<int> result;
  const char* next = text.data();
  const char* const end = next + text.size();
  while (true) {
    int value = 0;
    const auto read = std::from_chars(next, end, value);
    const bool good = read.ec == std::errc() && value >= 0 && (read.ptr == end || *read.ptr == separator);
    if (!good)
      throw ScheduleError(option + " '" + text + "' is not a list of stages.\n  Hint: " + option + " " + example);
    result.push_back(value);
    if (read.ptr == end) return result;
    next = read.ptr + 1;
  }
}

std::vector<Edge> parse_edges(const std::vector<std::string>& lists) {
  std::vector<Edge> result;
  for (const std::string& list : lists) {
    for (std::size_t begin = 0; begin <= list.size();) {
      const std::size_t end = std::min(list.find(',', begin), list.size());
      const std::vector<int> ends = numbers(list.substr(begin, end - begin), '-', "--edges", "0-3,1-2");
      if (ends.size() != 2)
        throw ScheduleError("--edges '" + list + "' is not a list of edges.\n  Hint: --edges 0-3,1-2");
      result.push_back({ends[0], ends[1]});
      begin = end + 1;
    }
  }
  return result;
}

std::vector<std::vector<int>> parse_groups(const std::vector<std::string>& lists) {
  std::vector<std::vector<int>> result;
  for (const std::string& group : lists) result.push_back(numbers(group, ',', "--shared", "0,3"));
  return result;
}

}  // namespace

void ScheduleOptions::add_to(CLI::App& command) {
  auto* const by_name = command.add_option("NAME", name, "Name of the schedule; `penstock schedule list` lists them");
  auto* const by_file =
      command.add_option("--csv", csv, "CSV file with a schedule, one row for each rank")->option_text("FILE");
  by_name->excludes(by_file);
  add_size_to(command);
  command
      .add_option("--stages-per-rank", stages_per_rank,
                  "Number of stages of each rank (default: 1 for GPipe and 1F1B, else 2)")
      ->option_text("V")
      ->check(whole_number())
      ->excludes(by_file);
  command.get_option("--ranks")->excludes(by_file);
  command.get_option("--microbatches")->excludes(by_file);
  command.add_option("--edges", edges, "Skip connections between stages, such as 0-3,1-2; repeatable")
      ->option_text("LIST")
      ->expected(1)
      ->take_all();
  command.add_option("--shared", shared, "Stages that share parameters, such as 0,3; repeatable")
      ->option_text("LIST")
      ->expected(1)
      ->take_all();
  command
      .add_option("--recompute", recompute,
                  "Whole stages whose forwards save their inputs only, and are computed again before their backwards: "
                  "all of them "
                  "(which `penstock train` calls stages), some such as 0,3, or none")
      ->option_text("all|stages|none|LIST [none]");
}

void ScheduleOptions::add_size_to(CLI::App& command) {
  command.add_option("--ranks", ranks, "Number of ranks")->option_text("P")->check(whole_number());
  command.add_option("--microbatches", microbatches, "Number of microbatches")->option_text("M")->check(whole_number());
}

std::string ScheduleOptions::title() const {
  return csv.empty() ? std::string(find_generator(name).name) : csv;
}

Schedule ScheduleOptions::schedule() const {
  const Schedule given = schedule_without_recomputation();
  if (recompute.empty() || recompute == "none") return given;
  if (recompute == "all" || recompute == "stages") return add_recomputation(given);
  return add_recomputation(given, numbers(recompute, ',', "--recompute", "all, or --recompute 0,3"));
}

Schedule ScheduleOptions::schedule_without_recomputation() const {
  if (!csv.empty()) {
    return parse_csv(read_file(csv), {.source = csv, .skips = parse_edges(edges), .shared = parse_groups(shared)});
  }
  if (name.empty())
    throw ScheduleError(
        "the schedule is missing: give its name, or a file with --csv.\n  Hint: `penstock schedule list` lists the "
        "names.");
  find_generator(name);
  require_size();
  const Schedule schedule =
      generate(name, {.ranks = ranks, .stages_per_rank = stages_per_rank, .microbatches = microbatches});
  StageGraph graph = schedule.graph();
  graph.add_edges(parse_edges(edges));
  for (const std::vector<int>& group : parse_groups(shared)) graph.share(group);
  return schedule.with_graph(std::move(graph));
}

void ScheduleOptions::require_size() const {
  if (ranks == 0) throw ScheduleError("--ranks is missing.\n  Hint: give the number of ranks, such as --ranks 4.");
  if (microbatches == 0)
    throw ScheduleError(
        "--microbatches is missing.\n  Hint: give the number of microbatches, such as --microbatches 8.");
}

void CostOptions::add_to(CLI::App& command) {
  const auto add = [&](const char* name, double& value, const std::string& description) {
    std::ostringstream text;
    text << "X [" << value << "]";
    command.add_option(name, value, description)->option_text(text.str())->check(cost());
  };
  add("--forward", costs.stage.forward,
      concat("Time of a forward of ", are_by_rank ? "all stages of a rank together" : "one stage and one microbatch",
             ", in any unit"));
  add("--input", costs.stage.input, "Time of an input backward, in the same unit");
  add("--weight", costs.stage.weight, "Time of a weight backward; a full backward takes the time of both");
  add("--latency", costs.link.latency, "Time from a send to its arrival");
  add("--bandwidth", costs.link.bandwidth, "Bandwidth of a link in bytes per unit of time (0: unlimited)");
  command
      .add_option("--costs", file,
                  are_by_rank ? "JSON file with times and sizes of all stages of a rank together, in one entry of "
                                "\"stages\" for each rank, times by link, and memory by rank"
                              : "JSON file with times and sizes by stage, times by link, and memory by rank, such as "
                                "costs.json of `penstock train`")
      ->option_text("FILE.json");
}

Costs CostOptions::get(int entries, int ranks) const {
  if (file.empty()) return costs;
  Costs result = parse_costs(read_file(file), file, costs);
  try {
    require_fit(result, entries, ranks);
  } catch (const ScheduleError& error) {
    throw ScheduleError(concat(file, ": ", error.what(),
                               are_by_rank && result.stages.size() > static_cast<std::size_t>(entries)
                                   ? "\n  Hint: `compare` takes one entry for each rank, with the costs of all its "
                                     "stages together; `penstock schedule simulate` takes costs by stage."
                                   : ""));
  }
  // Measured costs of a model that was cut into fewer stages.
  const bool has_sizes =
      std::ranges::any_of(result.stages, [](const auto& stage) { return stage.parameter_bytes > 0; });
  if (has_sizes && result.stages.size() < static_cast<std::size_t>(entries)) {
    std::cerr << "note: " << file << " has the costs of " << result.stages.size() << " of " << entries
              << " stages; the others take the default costs, without sizes.\n";
  }
  return result;
}

}  // namespace penstock::internal::cli
