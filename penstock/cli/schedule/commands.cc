// penstock schedule: lists, shows, exports, verifies and simulates schedules. compare.cc has `compare`.
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <iomanip>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "penstock/cli/checks.h"
#include "penstock/cli/command.h"
#include "penstock/cli/option_hints.h"
#include "penstock/cli/output.h"
#include "penstock/cli/schedule/compare.h"
#include "penstock/cli/schedule/contents.h"
#include "penstock/cli/schedule/options.h"
#include "penstock/schedule/csv.h"
#include "penstock/schedule/draw.h"
#include "penstock/schedule/generators.h"
#include "penstock/schedule/simulate.h"
#include "penstock/schedule/verify.h"

namespace penstock::internal::cli {
namespace {

// Returns the width of the terminal on standard output, or the default width if there is none.
int terminal_width() {
  winsize size{};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return TextOptions{}.width;
}

void add_list(CLI::App& parent) {
  auto* const command = parent.add_subcommand("list", "List the schedules");
  command->callback([] {
    for (const Generator& generator : generators()) {
      const std::string stages = generator.stages_per_rank == 0 ? "any" : std::to_string(generator.stages_per_rank);
      std::cout << std::left << std::setw(23) << generator.name << "stages per rank: " << std::setw(5) << stages
                << generator.summary << "\n";
    }
  });
}

void add_show(CLI::App& parent) {
  struct Options {
    ScheduleOptions spec;
    CostOptions costs;
    std::string format = "text";
    bool is_lowered = false;
    std::string output;
  };
  const auto options = std::make_shared<Options>();
  auto* const command = parent.add_subcommand("show", "Draw a schedule");
  options->spec.add_to(*command);
  options->costs.add_to(*command);
  command
      ->add_option("--format", options->format,
                   "Output format: text, svg, html (interactive timeline) or trace (Chrome, Perfetto)")
      ->check(one_of({"text", "svg", "html", "trace"}))
      ->option_text("FORMAT [text]");
  command->add_flag("--lowered", options->is_lowered,
                    "Show communication, sharding and reductions; with --format text, as a table of all actions");
  command->add_option("-o,--output", options->output, "File to write to (default: standard output)")
      ->option_text("FILE");
  command->callback([options] {
    const Schedule given = options->spec.schedule();
    const Schedule executed = lowered(given);
    const Costs costs = options->costs.get(executed.stages(), executed.ranks());
    const bool to_terminal = options->output.empty() && ::isatty(STDOUT_FILENO) == 1;
    write_output(options->output, [&](std::ostream& out) {
      if (options->format == "text" && options->is_lowered) {
        out << table_of(executed);
        return;
      }
      const Timeline timeline = simulate(executed, costs);
      const Drawing drawing{executed, timeline, costs, options->spec.title(), options->is_lowered};
      if (options->format == "svg") {
        draw_svg(out, drawing);
      } else if (options->format == "html") {
        draw_html(out, drawing);
      } else if (options->format == "trace") {
        draw_trace(out, drawing);
      } else {
        draw_text(out, drawing,
                  {.colour = to_terminal && std::getenv("NO_COLOR") == nullptr,
                   .width = to_terminal ? terminal_width() : TextOptions{}.width});
      }
    });
  });
}

void add_export(CLI::App& parent) {
  struct Options {
    ScheduleOptions spec;
    bool is_lowered = false;
    std::string output;
  };
  const auto options = std::make_shared<Options>();
  auto* const command = parent.add_subcommand("export", "Write a schedule as CSV, one row for each rank");
  options->spec.add_to(*command);
  command->add_flag("--lowered", options->is_lowered, "Write communication, sharding and reductions too");
  command->add_option("-o,--output", options->output, "File to write to (default: standard output)")
      ->option_text("FILE");
  command->callback([options] {
    const Schedule given = options->spec.schedule();
    const Schedule wanted = options->is_lowered ? lowered(given) : given;
    require_valid(wanted);
    for (const std::string& problem : problems_in_torch(wanted)) {
      std::cerr << "note: torch.distributed.pipelining " << problem << ".\n";
    }
    write_output(options->output, [&](std::ostream& out) { out << to_csv(wanted); });
  });
}

void add_verify(CLI::App& parent, int& exit) {
  const auto spec = std::make_shared<ScheduleOptions>();
  auto* const command =
      parent.add_subcommand("verify", "Verify that a schedule is complete, correctly ordered and free of deadlock");
  spec->add_to(*command);
  command->callback([spec, command, &exit] {
    const Schedule given = spec->schedule();
    if (const auto violation = verify(given)) {
      std::cout << spec->title() << ": not valid\n"
                << with_option_hints(explain(given, *violation), [&](const std::string& name) {
                     return command->get_option_no_throw(name) != nullptr;
                   });
      exit = kCheckFailed;
      return;
    }
    const Schedule executed = lowered(given);
    require_valid(executed);
    std::cout << spec->title() << ": valid: " << contents_text(executed) << ", no deadlock even if every send blocks\n";
  });
}

void add_simulate(CLI::App& parent) {
  struct Options {
    ScheduleOptions spec;
    CostOptions costs;
    bool json = false;
  };
  const auto options = std::make_shared<Options>();
  auto* const command =
      parent.add_subcommand("simulate", "Simulate a schedule: makespan, bubble, stalls, and peak memory of each rank");
  options->spec.add_to(*command);
  options->costs.add_to(*command);
  command->add_flag("--json", options->json, "Print JSON");
  command->callback([options] {
    const Schedule executed = lowered(options->spec.schedule());
    const Costs costs = options->costs.get(executed.stages(), executed.ranks());
    const Timeline timeline = simulate(executed, costs);
    if (options->json) {
      nlohmann::json result = {{"version", 1},
                               {"schedule", options->spec.title()},
                               {"makespan", timeline.makespan},
                               {"longest_span", timeline.longest_span},
                               {"bubble", timeline.bubble},
                               {"ranks", executed.ranks()},
                               {"stages", executed.stages()},
                               {"microbatches", executed.microbatches()},
                               {"actions", count_computations(executed)},
                               {"messages", count_messages(executed)}};
      for (int rank = 0; rank < executed.ranks(); ++rank) {
        const RankTimes& times = timeline.ranks[static_cast<std::size_t>(rank)];
        const double capacity = costs.of_rank(rank).capacity;
        nlohmann::json waiting = nlohmann::json::object();
        for (const auto& [other, time] : times.waiting) waiting[std::to_string(other)] = time;
        result["peak_activations"].push_back(times.peak_activations);
        result["static_bytes"].push_back(times.static_bytes);
        result["peak_bytes"].push_back(times.peak_bytes);
        result["capacity"].push_back(capacity > 0 ? nlohmann::json(capacity) : nlohmann::json());
        result["fits"].push_back(fits(costs.of_rank(rank), times.peak_bytes));
        result["work"].push_back(times.work);
        result["idle"].push_back({{"fill", times.fill}, {"drain", times.drain}, {"waiting", waiting}});
      }
      std::cout << result.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
      return;
    }
    std::cout << options->spec.title() << ": " << contents_text(executed) << "\n"
              << "makespan " << rounded(timeline.makespan, 3) << "   longest rank span "
              << rounded(timeline.longest_span, 3) << "   bubble " << rounded(100 * timeline.bubble, 1) << " %\n\n";
    std::vector<std::vector<std::string>> rows = {
        {"rank", "work", "fill", "drain", "waiting", "peak activations", "peak bytes", "waits most for"}};
    const bool has_capacity = std::ranges::any_of(costs.ranks, [](const RankCosts& rank) { return rank.capacity > 0; });
    if (has_capacity) rows.front().insert(rows.front().end() - 1, {"capacity", "fits"});
    for (int rank = 0; rank < executed.ranks(); ++rank) {
      const RankTimes& times = timeline.ranks[static_cast<std::size_t>(rank)];
      double waiting = 0;
      for (const auto& [other, time] : times.waiting) waiting += time;
      const auto most = std::ranges::max_element(times.waiting, {}, [](const auto& entry) { return entry.second; });
      std::vector<std::string>& row = rows.emplace_back(
          std::vector{std::to_string(rank), rounded(times.work, 3), rounded(times.fill, 3), rounded(times.drain, 3),
                      rounded(waiting, 3), std::to_string(times.peak_activations), rounded(times.peak_bytes, 0)});
      if (has_capacity) {
        const double capacity = costs.of_rank(rank).capacity;
        row.push_back(capacity > 0 ? rounded(capacity, 0) : "-");
        row.emplace_back(fits(costs.of_rank(rank), times.peak_bytes) ? "yes" : "no");
      }
      row.push_back(waiting > 0 ? "rank " + std::to_string(most->first) : "-");
    }
    write_columns(std::cout, rows);
  });
}

}  // namespace

void add_schedule_command(CLI::App& app, int& exit) {
  auto* const schedule =
      app.add_subcommand("schedule", "Generate, draw, verify, simulate and compare schedules (needs no libtorch)");
  schedule->require_subcommand(1);
  add_list(*schedule);
  add_show(*schedule);
  add_export(*schedule);
  add_verify(*schedule, exit);
  add_simulate(*schedule);
  add_compare(*schedule);
}

}  // namespace penstock::internal::cli
