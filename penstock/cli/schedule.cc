// penstock schedule: list, show, export, verify, simulate and compare schedules.
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <iomanip>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "penstock/cli/checks.h"
#include "penstock/cli/command.h"
#include "penstock/cli/output.h"
#include "penstock/schedule/csv.h"
#include "penstock/schedule/draw.h"
#include "penstock/schedule/error.h"
#include "penstock/schedule/generators.h"
#include "penstock/schedule/nearest.h"
#include "penstock/schedule/passes.h"
#include "penstock/schedule/simulate.h"
#include "penstock/schedule/verify.h"

namespace penstock::cli {
namespace {

// SPEC: which schedule is meant.
struct Spec {
  std::string name;
  std::string csv;
  int ranks = 0;
  int stages_per_rank = 0;
  int microbatches = 0;
  std::vector<std::string> edges;
  std::vector<std::string> shared;

  void add_to(CLI::App& command) {
    auto* const by_name = command.add_option("NAME", name, "A schedule; `penstock schedule list` names them");
    auto* const by_file =
        command.add_option("--csv", csv, "A file with a schedule, a row for each rank")->option_text("FILE");
    by_name->excludes(by_file);
    add_size_to(command);
    command.add_option("--stages-per-rank", stages_per_rank, "Stages a rank: 1 for GPipe and 1F1B, else 2")
        ->option_text("V")
        ->check(whole_number())
        ->excludes(by_file);
    command.get_option("--ranks")->excludes(by_file);
    command.get_option("--microbatches")->excludes(by_file);
    command.add_option("--edges", edges, "Skip connections between stages, such as 0-3,1-2; may be given again")
        ->option_text("LIST")
        ->expected(1)
        ->take_all();
    command.add_option("--shared", shared, "Stages that share parameters, such as 0,3; may be given again")
        ->option_text("LIST")
        ->expected(1)
        ->take_all();
  }

  void add_size_to(CLI::App& command) {
    command.add_option("--ranks", ranks, "How many ranks")->option_text("P")->check(whole_number());
    command.add_option("--microbatches", microbatches, "How many microbatches")
        ->option_text("M")
        ->check(whole_number());
  }

  std::string title() const { return csv.empty() ? std::string(find_generator(name).name) : csv; }

  Schedule schedule() const {
    if (!csv.empty()) {
      return parse_csv(read_file(csv), {.source = csv, .skips = parse_edges(), .shared = parse_groups()});
    }
    if (name.empty())
      throw ScheduleError("which schedule? Give its name, or a file with --csv.\n  Hint: penstock schedule list");
    find_generator(name);
    require_size();
    const Schedule schedule =
        generate(name, {.ranks = ranks, .stages_per_rank = stages_per_rank, .microbatches = microbatches});
    StageGraph graph = schedule.graph();
    graph.add_edges(parse_edges());
    for (const std::vector<int>& group : parse_groups()) graph.share(group);
    return schedule.with_graph(std::move(graph));
  }

  void require_size() const {
    if (ranks == 0) throw ScheduleError("--ranks is missing: how many ranks?");
    if (microbatches == 0) throw ScheduleError("--microbatches is missing: how many microbatches?");
  }

 private:
  // The numbers in a text such as "0,3", or with another sign between them.
  static std::vector<int> numbers(const std::string& text, char between, const std::string& option,
                                  const std::string& example) {
    std::vector<int> result;
    const char* at = text.data();
    const char* const end = at + text.size();
    while (true) {
      int value = 0;
      const auto read = std::from_chars(at, end, value);
      const bool good = read.ec == std::errc() && value >= 0 && (read.ptr == end || *read.ptr == between);
      if (!good)
        throw ScheduleError(option + " '" + text + "' is no list of stages.\n  Hint: " + option + " " + example);
      result.push_back(value);
      if (read.ptr == end) return result;
      at = read.ptr + 1;
    }
  }

  std::vector<Edge> parse_edges() const {
    std::vector<Edge> result;
    for (const std::string& list : edges) {
      for (std::size_t begin = 0; begin <= list.size();) {
        const std::size_t end = std::min(list.find(',', begin), list.size());
        const std::vector<int> ends = numbers(list.substr(begin, end - begin), '-', "--edges", "0-3,1-2");
        if (ends.size() != 2)
          throw ScheduleError("--edges '" + list + "' is no list of edges.\n  Hint: --edges 0-3,1-2");
        result.push_back({ends[0], ends[1]});
        begin = end + 1;
      }
    }
    return result;
  }

  std::vector<std::vector<int>> parse_groups() const {
    std::vector<std::vector<int>> result;
    for (const std::string& group : shared) result.push_back(numbers(group, ',', "--shared", "0,3"));
    return result;
  }
};

// COSTS: what the simulator reckons with.
struct CostOptions {
  Costs costs;
  std::string file;

  void add_to(CLI::App& command, const std::string& of) {
    const auto add = [&](const char* name, double& value, const std::string& what) {
      std::ostringstream usual;
      usual << "X [" << value << "]";
      command.add_option(name, value, what)->option_text(usual.str())->check(cost());
    };
    add("--forward", costs.stage.forward, "Time of a forward of " + of);
    add("--input", costs.stage.input, "Time of an input backward");
    add("--weight", costs.stage.weight, "Time of a weight backward; a full backward takes both");
    add("--latency", costs.link.latency, "Time from a send to its arrival");
    add("--bandwidth", costs.link.bandwidth, "Bytes a link carries in a unit of time; 0: without limit");
    command.add_option("--costs", file, "A file with costs by stage and by link")->option_text("FILE.json");
  }

  // Those of `entries` stages, or ranks' shares.
  Costs get(int entries, int ranks) const {
    if (file.empty()) return costs;
    Costs result = parse_costs(read_file(file), file, costs);
    try {
      require_fit(result, entries, ranks);
    } catch (const ScheduleError& error) {
      throw ScheduleError(file + ": " + error.what());
    }
    return result;
  }
};

// What is executed: the lists as they are if they have messages, else lowered.
Schedule lowered(const Schedule& schedule) {
  if (!features_of(schedule).communication) return lower(schedule);
  require_valid(schedule);
  return schedule;
}

// F, I, W and B; a pair has two.
std::size_t count_computations(const Schedule& schedule) {
  std::size_t count = 0;
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    for (const Action& action : schedule.actions(rank)) {
      if (action.is_compute()) count += action.is_overlap() ? 2 : 1;
    }
  }
  return count;
}

std::size_t count_messages(const Schedule& schedule) {
  std::size_t count = 0;
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    count += static_cast<std::size_t>(std::ranges::count_if(schedule.actions(rank), &Action::is_send));
  }
  return count;
}

std::string contents_text(const Schedule& schedule) {
  return size_text(schedule) + ", " + counted(count_computations(schedule), "computation") + ", " +
         counted(count_messages(schedule), "message");
}

// Of standard output, if it is a terminal.
int terminal_width() {
  winsize size{};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return TextOptions{}.width;
}

// Aligns columns of text; the first to the left, the others to the right.
void write_columns(std::ostream& out, const std::vector<std::vector<std::string>>& rows) {
  std::vector<std::size_t> widths(rows.front().size(), 0);
  for (const auto& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  for (const auto& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) {
      out << (i == 0 ? "" : "  ") << (i == 0 ? std::left : std::right) << std::setw(static_cast<int>(widths[i]))
          << row[i];
    }
    out << "\n";
  }
}

std::string rounded(double value, int digits) {
  std::array<char, 64> text;
  const int length = std::snprintf(text.data(), text.size(), "%.*f", digits, value);
  return {text.data(), static_cast<std::size_t>(std::clamp(length, 0, static_cast<int>(text.size()) - 1))};
}

void add_list(CLI::App& parent) {
  auto* const command = parent.add_subcommand("list", "Name the schedules");
  command->callback([] {
    for (const Generator& generator : generators()) {
      const std::string stages = generator.stages_per_rank == 0 ? "any" : std::to_string(generator.stages_per_rank);
      std::cout << std::left << std::setw(23) << generator.name << "stages a rank: " << std::setw(5) << stages
                << generator.summary << "\n";
    }
  });
}

void add_show(CLI::App& parent) {
  struct Options {
    Spec spec;
    CostOptions costs;
    std::string format = "text";
    bool is_lowered = false;
    std::string output;
  };
  const auto options = std::make_shared<Options>();
  auto* const command = parent.add_subcommand("show", "Draw a schedule");
  options->spec.add_to(*command);
  options->costs.add_to(*command, "one stage and one microbatch");
  command->add_option("--format", options->format, "text, svg, html (one page to zoom in) or trace (Chrome, Perfetto)")
      ->check(one_of({"text", "svg", "html", "trace"}))
      ->option_text("FORMAT [text]");
  command->add_flag("--lowered", options->is_lowered,
                    "With messages, sharding and reductions; as text, a table of the lists");
  command->add_option("-o,--output", options->output, "Write to a file")->option_text("FILE");
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
    Spec spec;
    bool is_lowered = false;
    std::string output;
  };
  const auto options = std::make_shared<Options>();
  auto* const command = parent.add_subcommand("export", "Write a schedule as CSV, a row for each rank");
  options->spec.add_to(*command);
  command->add_flag("--lowered", options->is_lowered, "With messages, sharding and reductions");
  command->add_option("-o,--output", options->output, "Write to a file")->option_text("FILE");
  command->callback([options] {
    const Schedule given = options->spec.schedule();
    const Schedule wanted = options->is_lowered ? lowered(given) : given;
    require_valid(wanted);
    write_output(options->output, [&](std::ostream& out) { out << to_csv(wanted); });
  });
}

void add_verify(CLI::App& parent, int& exit) {
  const auto spec = std::make_shared<Spec>();
  auto* const command =
      parent.add_subcommand("verify", "Prove that a schedule is complete, in order and free of deadlock");
  spec->add_to(*command);
  command->callback([spec, &exit] {
    const Schedule given = spec->schedule();
    if (const auto violation = verify(given)) {
      std::cout << spec->title() << ": not valid\n" << explain(given, *violation);
      exit = kNo;
      return;
    }
    const Schedule executed = lowered(given);
    require_valid(executed);
    std::cout << spec->title() << ": valid: " << contents_text(executed) << ", no deadlock even if every send blocks\n";
  });
}

void add_simulate(CLI::App& parent) {
  struct Options {
    Spec spec;
    CostOptions costs;
    bool json = false;
  };
  const auto options = std::make_shared<Options>();
  auto* const command =
      parent.add_subcommand("simulate", "Reckon how long a schedule takes, who waits for whom, and what ranks keep");
  options->spec.add_to(*command);
  options->costs.add_to(*command, "one stage and one microbatch");
  command->add_flag("--json", options->json, "As JSON");
  command->callback([options] {
    const Schedule executed = lowered(options->spec.schedule());
    const Timeline timeline = simulate(executed, options->costs.get(executed.stages(), executed.ranks()));
    if (options->json) {
      nlohmann::json result = {{"version", 1},
                               {"schedule", options->spec.title()},
                               {"makespan", timeline.makespan},
                               {"bubble", timeline.bubble},
                               {"ranks", executed.ranks()},
                               {"stages", executed.stages()},
                               {"microbatches", executed.microbatches()},
                               {"actions", count_computations(executed)},
                               {"messages", count_messages(executed)}};
      for (const RankTimes& times : timeline.ranks) {
        nlohmann::json waiting = nlohmann::json::object();
        for (const auto& [rank, time] : times.waiting) waiting[std::to_string(rank)] = time;
        result["peak_activations"].push_back(times.peak_activations);
        result["peak_bytes"].push_back(times.peak_bytes);
        result["work"].push_back(times.work);
        result["idle"].push_back({{"fill", times.fill}, {"drain", times.drain}, {"waiting", waiting}});
      }
      std::cout << result.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
      return;
    }
    std::cout << options->spec.title() << ": " << contents_text(executed) << "\n"
              << "makespan " << rounded(timeline.makespan, 3) << "   bubble " << rounded(100 * timeline.bubble, 1)
              << " %\n\n";
    std::vector<std::vector<std::string>> rows = {
        {"rank", "work", "fill", "drain", "waiting", "peak activations", "peak bytes", "waits most for"}};
    for (std::size_t rank = 0; rank < timeline.ranks.size(); ++rank) {
      const RankTimes& times = timeline.ranks[rank];
      double waiting = 0;
      for (const auto& [other, time] : times.waiting) waiting += time;
      const auto most = std::ranges::max_element(times.waiting, {}, [](const auto& entry) { return entry.second; });
      rows.push_back({std::to_string(rank), rounded(times.work, 3), rounded(times.fill, 3), rounded(times.drain, 3),
                      rounded(waiting, 3), std::to_string(times.peak_activations), rounded(times.peak_bytes, 0),
                      waiting > 0 ? "rank " + std::to_string(most->first) : "-"});
    }
    write_columns(std::cout, rows);
  });
}

void add_compare(CLI::App& parent) {
  struct Options {
    Spec size;
    CostOptions costs;
  };
  const auto options = std::make_shared<Options>();
  auto* const command =
      parent.add_subcommand("compare", "All schedules side by side, the best first, with the same work for each rank");
  options->size.add_size_to(*command);
  options->costs.add_to(*command, "a rank's whole share of the model, which its stages divide");
  command->callback([options] {
    struct Row {
      const Generator* generator;
      Timeline timeline;
      std::size_t messages;
      int stages_per_rank;
    };
    options->size.require_size();
    const Costs by_rank = options->costs.get(options->size.ranks, options->size.ranks);
    std::vector<Row> rows;
    for (const Generator& generator : generators()) {
      const Schedule schedule =
          generate(generator.name, {.ranks = options->size.ranks, .microbatches = options->size.microbatches});
      // Without a backward it is not the same work.
      if (!features_of(schedule).backward) continue;
      const Schedule executed = lower(schedule);
      rows.push_back({&generator, simulate(executed, shared_out(by_rank, executed.placement())),
                      count_messages(executed), generator.default_stages_per_rank()});
    }
    std::ranges::stable_sort(rows, {}, [](const Row& row) { return row.timeline.makespan; });
    std::vector<std::vector<std::string>> table = {
        {"schedule", "stages a rank", "makespan", "bubble", "microbatches kept", "messages"}};
    for (const Row& row : rows) {
      // In whole shares of a rank, since a stage's is smaller the more of them there are.
      const int peak = std::ranges::max(row.timeline.ranks, {}, &RankTimes::peak_activations).peak_activations;
      table.push_back({std::string(row.generator->name), std::to_string(row.stages_per_rank),
                       rounded(row.timeline.makespan, 3), rounded(100 * row.timeline.bubble, 1) + " %",
                       rounded(1.0 * peak / row.stages_per_rank, 1), std::to_string(row.messages)});
    }
    write_columns(std::cout, table);
  });
}

}  // namespace

void add_schedule_command(CLI::App& app, int& exit) {
  auto* const schedule =
      app.add_subcommand("schedule", "Make, draw, verify, simulate and compare schedules; needs no libtorch");
  schedule->require_subcommand(1);
  add_list(*schedule);
  add_show(*schedule);
  add_export(*schedule);
  add_verify(*schedule, exit);
  add_simulate(*schedule);
  add_compare(*schedule);
}

}  // namespace penstock::cli
