// penstock schedule compare: simulates all schedules with the same work for each rank.
#include "penstock/cli/schedule/compare.h"

#include <algorithm>
#include <cmath>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "penstock/cli/byte_units.h"
#include "penstock/cli/checks.h"
#include "penstock/cli/output.h"
#include "penstock/cli/read_number.h"
#include "penstock/cli/schedule/contents.h"
#include "penstock/cli/schedule/options.h"
#include "penstock/schedule/csv.h"
#include "penstock/schedule/error.h"
#include "penstock/schedule/generators.h"
#include "penstock/schedule/simulate.h"

namespace penstock::internal::cli {
namespace {

// Memory of a rank: all of it in bytes, or that for saved activations in microbatches of the rank's share of the model.
struct MemoryLimit {
  double amount = 0;
  bool is_bytes = false;

  static MemoryLimit parse(const std::string& text) {
    if (const auto bytes = parse_bytes(text)) return {.amount = *bytes, .is_bytes = true};
    const std::optional<double> microbatches = read_number<double>(text);
    if (microbatches && std::isfinite(*microbatches) && *microbatches > 0) return {.amount = *microbatches};
    throw ScheduleError("--memory '" + text +
                        "' is neither a number of microbatches nor of bytes.\n  Hint: --memory 4 for microbatches, or "
                        "bytes with B, kB, MB, GB, TB, KiB, MiB, GiB or TiB, such as --memory 512MiB");
  }
};

struct CompareOptions {
  ScheduleOptions size;
  CostOptions costs;
  std::vector<std::string> files;
  std::optional<std::string> memory;
  bool json = false;
};

// Simulation results of one schedule.
struct Row {
  std::string name;
  int stages = 0;
  int fewest_stages_per_rank = 0;
  int most_stages_per_rank = 0;
  Timeline timeline;
  std::size_t messages = 0;
  // Peak of any rank: in microbatches of the rank's share of the model, as a stage is smaller the more of them a rank
  // has; and in bytes.
  double microbatches = 0;
  double bytes = 0;
  // True if each rank stays within the capacity that the costs give it.
  bool within_capacity = true;

  bool fits(const std::optional<MemoryLimit>& limit) const {
    return within_capacity && (!limit || (limit->is_bytes ? bytes : microbatches) <= limit->amount);
  }
};

Row simulated(std::string name, const Schedule& schedule, const Costs& by_rank) {
  const Schedule executed = lowered(schedule);
  const Placement& placement = executed.placement();
  Row row{.name = std::move(name),
          .stages = executed.stages(),
          .fewest_stages_per_rank = executed.stages(),
          .timeline = simulate(executed, split_rank_costs(by_rank, placement)),
          .messages = count_messages(executed)};
  for (int rank = 0; rank < executed.ranks(); ++rank) {
    const RankTimes& times = row.timeline.ranks[static_cast<std::size_t>(rank)];
    const int stages = static_cast<int>(placement.stages_of(rank).size());
    row.fewest_stages_per_rank = std::min(row.fewest_stages_per_rank, stages);
    row.most_stages_per_rank = std::max(row.most_stages_per_rank, stages);
    if (stages > 0) row.microbatches = std::max(row.microbatches, 1.0 * times.peak_activations / stages);
    row.bytes = std::max(row.bytes, times.peak_bytes);
    row.within_capacity = row.within_capacity && penstock::fits(by_rank.of_rank(rank), times.peak_bytes);
  }
  return row;
}

// Reads the schedules of --csv. Unless the options give the numbers of ranks and microbatches, `size` is set to theirs.
std::vector<Schedule> read_files(const std::vector<std::string>& files, ScheduleOptions& size) {
  std::vector<Schedule> schedules;
  for (const std::string& file : files) {
    schedules.push_back(parse_csv(read_file(file), {.source = file}));
    const Schedule& read = schedules.back();
    if (size.ranks == 0) size.ranks = read.ranks();
    if (size.microbatches == 0) size.microbatches = read.microbatches();
    if (read.ranks() != size.ranks || read.microbatches() != size.microbatches) {
      throw ScheduleError(file + ": found " + size_text(read) + ", but the schedules it is compared with have " +
                          counted(static_cast<std::size_t>(size.ranks), "rank") + " and " +
                          counted(static_cast<std::size_t>(size.microbatches), "microbatch") +
                          ".\n  Hint: compare schedules of the same work: see --ranks and --microbatches.");
    }
    if (!features_of(read).backward) {
      throw ScheduleError(file + ": has no backwards, and only schedules of whole steps can be compared.\n  Hint: " +
                          "simulate it alone with `penstock schedule simulate --csv " + file + "`.");
    }
  }
  return schedules;
}

void require_bytes(const Costs& by_rank, int ranks, const std::string& memory) {
  for (int rank = 0; rank < ranks; ++rank) {
    if (by_rank.of_stage(rank).activation_bytes > 0) continue;
    throw ScheduleError("--memory " + memory +
                        " is in bytes, but the costs do not give the size of the activations of rank " +
                        std::to_string(rank) + ".\n  Hint: give activation_bytes for each rank in " +
                        "--costs FILE.json, or a number of microbatches.");
  }
}

std::string stages_text(const Row& row) {
  const std::string most = std::to_string(row.most_stages_per_rank);
  if (row.fewest_stages_per_rank == row.most_stages_per_rank) return most;
  return std::to_string(row.fewest_stages_per_rank) + " to " + most;
}

void write_table(const std::vector<Row>& rows, const std::optional<MemoryLimit>& limit, bool has_limit) {
  const bool has_bytes = std::ranges::any_of(rows, [](const Row& row) { return row.bytes > 0; });
  std::vector<std::vector<std::string>> table = {
      {"schedule", "stages per rank", "makespan", "longest rank span", "bubble", "peak microbatches"}};
  if (has_bytes) table.front().emplace_back("peak bytes");
  table.front().emplace_back("messages");
  if (has_limit) table.front().emplace_back("fits");
  for (const Row& row : rows) {
    std::vector<std::string>& line = table.emplace_back(std::vector{
        row.name, stages_text(row), rounded(row.timeline.makespan, 3), rounded(row.timeline.longest_span, 3),
        rounded(100 * row.timeline.bubble, 1) + " %", rounded(row.microbatches, 1)});
    if (has_bytes) line.push_back(rounded(row.bytes, 0));
    line.push_back(std::to_string(row.messages));
    if (has_limit) line.emplace_back(row.fits(limit) ? "yes" : "no");
  }
  write_columns(std::cout, table);
}

void write_json(const std::vector<Row>& rows, const ScheduleOptions& size, const std::optional<MemoryLimit>& limit,
                bool has_limit) {
  nlohmann::json result = {{"version", 1}, {"ranks", size.ranks}, {"microbatches", size.microbatches}};
  if (limit) result["memory"] = {{limit->is_bytes ? "bytes" : "microbatches", limit->amount}};
  for (const Row& row : rows) {
    nlohmann::json entry = {{"schedule", row.name},
                            {"stages", row.stages},
                            {"stages_per_rank", row.most_stages_per_rank},
                            {"makespan", row.timeline.makespan},
                            {"longest_span", row.timeline.longest_span},
                            {"bubble", row.timeline.bubble},
                            {"peak_microbatches", row.microbatches},
                            {"peak_bytes", row.bytes},
                            {"messages", row.messages}};
    for (const RankTimes& times : row.timeline.ranks) entry["peak_bytes_by_rank"].push_back(times.peak_bytes);
    if (has_limit) entry["fits"] = row.fits(limit);
    result["schedules"].push_back(std::move(entry));
  }
  std::cout << result.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
}

void compare(CompareOptions options) {
  const std::vector<Schedule> from_files = read_files(options.files, options.size);
  options.size.require_size();
  const int ranks = options.size.ranks;
  const Costs by_rank = options.costs.get(ranks, ranks);
  std::optional<MemoryLimit> limit;
  if (options.memory) limit = MemoryLimit::parse(*options.memory);
  if (limit && limit->is_bytes) require_bytes(by_rank, ranks, *options.memory);

  const bool has_limit =
      limit || std::ranges::any_of(by_rank.ranks, [](const RankCosts& rank) { return rank.capacity > 0; });
  std::vector<Row> rows;
  for (std::size_t i = 0; i < from_files.size(); ++i) {
    rows.push_back(simulated(options.files[i], from_files[i], by_rank));
  }
  for (const Generator& generator : generators()) {
    const int per_rank = generator.stages_per_rank == 0 ? options.size.stages_per_rank : 0;
    const Schedule schedule = generate(
        generator.name, {.ranks = ranks, .stages_per_rank = per_rank, .microbatches = options.size.microbatches});
    // A schedule without backwards does less work.
    if (features_of(schedule).backward) rows.push_back(simulated(std::string(generator.name), schedule, by_rank));
  }
  std::ranges::stable_sort(rows, {}, [](const Row& row) { return row.timeline.makespan; });
  if (options.json) {
    write_json(rows, options.size, limit, has_limit);
  } else {
    write_table(rows, limit, has_limit);
  }
}

}  // namespace

void add_compare(CLI::App& parent) {
  const auto options = std::make_shared<CompareOptions>();
  auto* const command =
      parent.add_subcommand("compare", "Compare all schedules with the same work for each rank, the fastest first");
  options->size.add_size_to(*command);
  command
      ->add_option("--stages-per-rank", options->size.stages_per_rank,
                   "Number of stages of each rank, for schedules that allow any number")
      ->option_text("V [2]")
      ->check(whole_number());
  command
      ->add_option(
          "--csv", options->files,
          "CSV file with a schedule to compare too; sets the defaults of --ranks and --microbatches; repeatable")
      ->option_text("FILE")
      ->expected(1)
      ->take_all();
  options->costs.are_by_rank = true;
  options->costs.add_to(*command);
  command
      ->add_option(
          "--memory", options->memory,
          "Memory of a rank, to mark the schedules that fit: microbatches of saved activations such as 4, or bytes for "
          "all that it keeps such as 512MiB (needs activation_bytes in --costs). Capacities in --costs count too")
      ->option_text("N");
  command->add_flag("--json", options->json, "Print JSON");
  command->callback([options] { compare(*options); });
}

}  // namespace penstock::internal::cli
