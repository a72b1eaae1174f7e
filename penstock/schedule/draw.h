// Draws schedules on their timelines: as text, SVG, a trace for Chrome and Perfetto, or an interactive HTML page. Also
// formats the table of steps and ranks that errors show.
//
//   const Timeline timeline = simulate(schedule, costs);
//   draw_text(std::cout, {schedule, timeline, costs, "ZBVZeroBubble"});
#pragma once

#include <iosfwd>
#include <string>
#include <vector>

#include "penstock/schedule/schedule.h"
#include "penstock/schedule/simulate.h"

namespace penstock {

// Input of the draw_ functions. It refers to the schedule, the timelines and the costs, which must outlive it.
struct Drawing {
  const Schedule& schedule;
  // Start and end of each action, simulated or measured.
  const Timeline& timeline;
  const Costs& costs;
  // Heading, such as "ZBVZeroBubble".
  std::string title;
  // If true, messages and operations on parameters are drawn too, not only computations.
  bool all_actions = false;

  // The remaining fields are used by draw_html only. Name of the timeline, and a second timeline of the same schedule
  // to draw below it; null for none.
  std::string name = "simulated";
  const Timeline* second_timeline = nullptr;
  std::string second_name = {};
  // Unit of time, such as "ms".
  std::string unit = {};
  // Values to plot above the timeline over the steps of a run, such as losses, and the number of the first step.
  // Nothing is plotted for fewer than two values. A value that is not finite leaves a gap.
  std::string curve_name = {};
  std::vector<double> curve = {};
  int curve_first_step = 1;
};

struct TextOptions {
  bool colour = false;
  // Maximum number of columns. If the labelled blocks need more, each block is drawn with a letter instead of a label.
  int width = 240;
};

// Draws a row of labelled blocks for each rank, followed by a legend and metrics.
void draw_text(std::ostream& out, const Drawing& drawing, const TextOptions& options = {});
// Draws the same as an SVG image.
void draw_svg(std::ostream& out, const Drawing& drawing);
// Writes trace events for Chrome's tracing and Perfetto. One unit of time becomes 1000 microseconds.
void draw_trace(std::ostream& out, const Drawing& drawing);
// Writes a self-contained page with an interactive timeline for mouse and keyboard.
void draw_html(std::ostream& out, const Drawing& drawing);

struct TableOptions {
  // Cell to mark; -1 for none.
  int mark_rank = -1;
  int mark_position = -1;
  std::string mark = "<-- here";
  // Number of steps to show before and after the mark, and number of ranks to show; 0 for all.
  int steps_around = 0;
  int most_ranks = 0;
};

// Returns the actions of all ranks side by side: a line for each step, a column for each rank.
std::string table_of(const Schedule& schedule, const TableOptions& options = {});

}  // namespace penstock
