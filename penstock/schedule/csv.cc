#include "penstock/schedule/csv.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/schedule/error.h"
#include "penstock/schedule/source.h"

namespace penstock {
namespace {

using internal::concat;

// An action and its location in the file.
struct Placed {
  Action action;
  int rank;
  std::size_t line;
  std::size_t column;
};

std::string quoted(const Action& action) {
  std::string text = "'";
  append_text(text, action);
  return text + "'";
}

[[noreturn]] void fail(const std::string& source, std::size_t line, std::size_t column, const std::string& what) {
  throw ScheduleError(concat(source, ":", line, ":", column, ": ", what));
}

// Removes the next line from `text` and returns it without its end, which may be \n or \r\n.
std::string_view take_line(std::string_view& text) {
  const std::size_t end = text.find('\n');
  std::string_view line = text.substr(0, end);
  text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  if (line.ends_with('\r')) line.remove_suffix(1);
  return line;
}

constexpr std::string_view kBlanks = " \t";

// Text of a cell without the blanks and quotation marks around it, and its index in the line.
struct Text {
  std::string_view text;
  std::size_t begin;
};
Text unquoted(std::string_view line, std::size_t begin, std::size_t end) {
  const std::size_t first = std::min(line.find_first_not_of(kBlanks, begin), end);
  std::string_view cell = line.substr(first, end - first);
  cell = cell.substr(0, cell.find_last_not_of(kBlanks) + 1);
  if (cell.size() >= 2 && cell.starts_with('"') && cell.ends_with('"')) {
    return {.text = cell.substr(1, cell.size() - 2), .begin = first + 1};
  }
  return {.text = cell, .begin = first};
}

// Contents of a file: the actions with their locations, and the line of each rank's row.
struct Cells {
  std::vector<Placed> actions;
  std::vector<std::size_t> rows;
};

Cells read_cells(std::string_view text, const std::string& source) {
  if (text.starts_with("\xEF\xBB\xBF")) text.remove_prefix(3);
  Cells cells;
  for (std::size_t line_number = 1; !text.empty(); ++line_number) {
    const std::string_view whole = take_line(text);
    const std::string_view line = whole.substr(0, whole.find('#'));
    if (line.find_first_not_of(kBlanks) == std::string_view::npos) continue;
    const int rank = static_cast<int>(cells.rows.size());
    cells.rows.push_back(line_number);
    for (std::size_t begin = 0; begin <= line.size();) {
      const std::size_t end = std::min(line.find(',', begin), line.size());
      const Text cell = unquoted(line, begin, end);
      if (!cell.text.empty()) {
        try {
          cells.actions.push_back({parse_action(cell.text), rank, line_number, cell.begin + 1});
        } catch (const ScheduleError& error) {
          fail(source, line_number, cell.begin + 1, error.what());
        }
      }
      begin = end + 1;
    }
  }
  return cells;
}

}  // namespace

std::string to_csv(const Schedule& schedule) {
  std::string out;
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    bool first = true;
    for (const Action& action : schedule.actions(rank)) {
      if (!std::exchange(first, false)) out += ',';
      append_text(out, action);
    }
    if (first) out += ',';
    out += '\n';
  }
  return out;
}

Schedule parse_csv(std::string_view text, const CsvOptions& options) {
  const auto [cells, rows] = read_cells(text, options.source);
  if (cells.empty()) {
    throw ScheduleError(
        concat(options.source, ": contains no action.\n  Hint: write a row for each rank, such as 0F0,0F1,0B0,0B1."));
  }

  // Every stage and every microbatch needs a forward, so a valid file has more actions than its largest index. Checking
  // that here bounds the memory that a hostile file can demand.
  const std::size_t most = 2 * cells.size();
  int stages = 0;
  int microbatches = 0;
  for (const Placed& cell : cells) {
    for_each_part(cell.action, [&](const Action& part) {
      if (static_cast<std::size_t>(part.stage) >= most ||
          (part.microbatch != kNone && static_cast<std::size_t>(part.microbatch) >= most)) {
        fail(options.source, cell.line, cell.column,
             concat(quoted(cell.action), " has an index out of range: the file has only ", cells.size(),
                    " actions, and stages and microbatches are counted from 0."));
      }
      stages = std::max(stages, part.stage + 1);
      microbatches = std::max(microbatches, part.microbatch + 1);
    });
  }

  std::vector<int> rank_of_stage(static_cast<std::size_t>(stages), kNone);
  std::vector<Edge> skips;
  for (const Placed& cell : cells) {
    for_each_part(cell.action, [&](const Action& part) {
      int& rank = rank_of_stage[static_cast<std::size_t>(part.stage)];
      if (rank == kNone) rank = cell.rank;
      if (rank != cell.rank) {
        fail(options.source, cell.line, cell.column,
             concat(quoted(cell.action), " is in the row of rank ", cell.rank, ", but stage ", part.stage,
                    " already has actions on rank ", rank, "."));
      }
    });
    if (!cell.action.is_message()) continue;
    const Edge along = edge_under(cell.action);
    if (along.to == along.from + 1) continue;
    if (along.from < 0 || along.from >= along.to || along.to >= stages) {
      fail(options.source, cell.line, cell.column,
           concat(quoted(cell.action),
                  " is not along a possible edge: edges lead from an earlier stage to a later one, "
                  "and the file has ",
                  stages, " stages."));
    }
    skips.push_back(along);
  }
  for (int stage = 0; stage < stages; ++stage) {
    if (rank_of_stage[static_cast<std::size_t>(stage)] == kNone) {
      throw ScheduleError(concat(options.source, ": stage ", stage, " has no action, but stage ", stages - 1, " has."));
    }
  }
  StageGraph graph(stages);
  graph.add_edges(skips);
  graph.add_edges(options.skips);
  for (const std::vector<int>& group : options.shared) graph.share(group);

  Schedule schedule(Placement(std::move(rank_of_stage), static_cast<int>(rows.size())), std::move(graph),
                    std::max(microbatches, 1));
  const auto source = std::make_shared<ScheduleSource>(options.source);
  auto cell = cells.begin();
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    source->add_row(rows[static_cast<std::size_t>(rank)]);
    for (; cell != cells.end() && cell->rank == rank; ++cell) {
      schedule.add(rank, cell->action);
      source->add_action(cell->action, cell->column);
    }
  }
  schedule.set_source(source);
  return schedule;
}

}  // namespace penstock
