// Schedules as pictures: rows of text, SVG, a trace for Chrome and Perfetto, one HTML page; and the table of steps and
// ranks that errors show.
#pragma once

#include <iosfwd>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/schedule/schedule.h"
#include "penstock/schedule/simulate.h"

namespace penstock {

// What is drawn: a schedule, when its actions ran and what they cost. It refers to what it is made from.
struct Drawing {
  const Schedule& schedule;
  const Timeline& timeline;
  const Costs& costs;
  // Such as "ZBVZeroBubble".
  std::string title;
  // Messages and changes of parameters too, not computations alone.
  bool all_actions = false;

  // The rest is for draw_html alone. What the timeline is, and another one of the same schedule to show beside it.
  std::string name = "simulated";
  const Timeline* beside = nullptr;
  std::string beside_name = {};
  // Of time, such as "ms".
  std::string unit = {};
  // Values to show above as a curve over the steps of a run, such as its losses, and the number of the first step; no
  // curve is shown for fewer than two values. Values that are not finite leave a gap.
  std::string curve_name = {};
  std::vector<double> curve = {};
  int curve_first_step = 1;
};

struct TextOptions {
  bool colour = false;
  // Columns to keep to. A schedule that is wider with its labels is drawn with a letter for each computation.
  int width = 240;
};

// Rows of blocks on a scale of time, a row for each rank, and the figures below.
void draw_text(std::ostream& out, const Drawing& drawing, const TextOptions& options = {});
void draw_svg(std::ostream& out, const Drawing& drawing);
// Trace events, a microsecond for a thousandth of the unit of time.
void draw_trace(std::ostream& out, const Drawing& drawing);
// One page that needs nothing else: zoom, pan, a card for each action, by mouse and keyboard.
void draw_html(std::ostream& out, const Drawing& drawing);

// The lists side by side: a line for each step, a column for each rank.
struct TableOptions {
  // The place to mark, or none.
  int mark_rank = -1;
  int mark_position = -1;
  std::string mark = "<-- here";
  // Steps before and after the mark to show, and columns of ranks; 0: all.
  int steps_around = 0;
  int most_ranks = 0;
};
std::string table_of(const Schedule& schedule, const TableOptions& options = {});

}  // namespace penstock
