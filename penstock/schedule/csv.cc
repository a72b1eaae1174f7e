#include "penstock/schedule/csv.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "penstock/schedule/error.h"

namespace penstock {
namespace {

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
  throw ScheduleError(source + ":" + std::to_string(line) + ":" + std::to_string(column) + ": " + what);
}

// The next line of `text` without its end, which may be \n or \r\n.
std::string_view take_line(std::string_view& text) {
  const std::size_t end = text.find('\n');
  std::string_view line = text.substr(0, end);
  text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  if (line.ends_with('\r')) line.remove_suffix(1);
  return line;
}

std::string_view unquoted(std::string_view cell) {
  const std::size_t begin = cell.find_first_not_of(" \t");
  if (begin == std::string_view::npos) return {};
  cell = cell.substr(begin, cell.find_last_not_of(" \t") - begin + 1);
  if (cell.size() >= 2 && cell.starts_with('"') && cell.ends_with('"')) return cell.substr(1, cell.size() - 2);
  return cell;
}

std::vector<Placed> read_cells(std::string_view text, const std::string& source, int& ranks) {
  if (text.starts_with("\xEF\xBB\xBF")) text.remove_prefix(3);
  std::vector<Placed> cells;
  std::size_t line_number = 0;
  while (!text.empty()) {
    const std::string_view line = take_line(text);
    const int rank = static_cast<int>(line_number++);
    for (std::size_t begin = 0; begin <= line.size();) {
      const std::size_t end = std::min(line.find(',', begin), line.size());
      const std::string_view cell = unquoted(line.substr(begin, end - begin));
      if (!cell.empty()) {
        try {
          cells.push_back({parse_action(cell), rank, line_number, begin + 1});
        } catch (const ScheduleError& error) {
          fail(source, line_number, begin + 1, error.what());
        }
      }
      begin = end + 1;
    }
  }
  // Empty lines at the end are no ranks.
  ranks = cells.empty() ? 0 : cells.back().rank + 1;
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
    out += '\n';
  }
  return out;
}

Schedule parse_csv(std::string_view text, const CsvOptions& options) {
  int ranks = 0;
  const std::vector<Placed> cells = read_cells(text, options.source, ranks);
  if (cells.empty()) {
    throw ScheduleError(options.source +
                        ": there is no action in it.\n  Hint: a row for each rank, such as 0F0,0F1,0B0,0B1");
  }

  // Every stage and every microbatch has a forward, so a file names no more of them than it has actions.
  const std::size_t most = 2 * cells.size();
  int stages = 0;
  int microbatches = 0;
  for (const Placed& cell : cells) {
    for_each_part(cell.action, [&](const Action& part) {
      if (static_cast<std::size_t>(part.stage) >= most ||
          (part.microbatch != kNone && static_cast<std::size_t>(part.microbatch) >= most)) {
        fail(options.source, cell.line, cell.column,
             quoted(cell.action) +
                 " counts further than the file has actions: with all stages and microbatches from 0 on, there would "
                 "be more.");
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
             quoted(cell.action) + " stands in the row of rank " + std::to_string(cell.rank) + ", but stage " +
                 std::to_string(part.stage) + " has actions on rank " + std::to_string(rank) + " already.");
      }
    });
    if (!cell.action.is_message()) continue;
    const Edge along = edge_under(cell.action);
    if (along.to == along.from + 1) continue;
    if (along.from < 0 || along.from >= along.to || along.to >= stages) {
      fail(options.source, cell.line, cell.column,
           quoted(cell.action) + " goes along no edge that can be: from an earlier stage to a later one of the " +
               std::to_string(stages) + " in the file.");
    }
    skips.push_back(along);
  }
  for (int stage = 0; stage < stages; ++stage) {
    if (rank_of_stage[static_cast<std::size_t>(stage)] == kNone) {
      throw ScheduleError(options.source + ": stage " + std::to_string(stage) + " has no action, but stage " +
                          std::to_string(stages - 1) + " has.");
    }
  }
  StageGraph graph(stages);
  graph.add_edges(skips);
  graph.add_edges(options.skips);
  for (const std::vector<int>& group : options.shared) graph.share(group);

  Schedule schedule(Placement(std::move(rank_of_stage), ranks), std::move(graph), std::max(microbatches, 1));
  for (const Placed& cell : cells) schedule.add(cell.rank, cell.action);
  return schedule;
}

}  // namespace penstock
