#include "penstock/base/text.h"

#include <algorithm>
#include <cmath>
#include <ostream>
#include <vector>

#include "penstock/schedule/draw/blocks.h"

namespace penstock {
namespace {

using internal::Block;
using internal::colour_of;
using internal::concat;
using internal::for_each_block;
using internal::number_text;

// Metrics of each rank are printed for at most this many ranks.
constexpr int kMostRankMetrics = 32;

struct Column {
  char letter = ' ';
  // Index of the terminal's 256-colour palette; 0 for none.
  int colour = 0;
};
using Row = std::vector<Column>;

class TextPicture {
 public:
  TextPicture(const Drawing& drawing, const TextOptions& options)
      : drawing_(drawing), options_(options), margin_(concat("rank ", drawing.schedule.ranks() - 1).size() + 3) {
    const auto available =
        static_cast<double>(std::max<std::ptrdiff_t>(20, options.width - static_cast<std::ptrdiff_t>(margin_)));
    const double wanted = columns_for_labels();
    labelled_ = wanted <= available;
    columns_ = labelled_ ? wanted : available;
  }

  void draw(std::ostream& out) const {
    out << drawing_.title << ": " << size_text(drawing_.schedule) << "\n\n";
    for (int rank = 0; rank < drawing_.schedule.ranks(); ++rank) draw_row(out, rank);
    out << "\n";
    draw_legend(out);
    draw_metrics(out);
  }

 private:
  // Returns the number of columns of a timeline in which every computation fits its label and a gap.
  double columns_for_labels() const {
    double columns = 0;
    for (int rank = 0; rank < drawing_.schedule.ranks(); ++rank) {
      for_each_block(drawing_, rank, [&](const Block& block) {
        const double share = (block.span.end - block.span.start) / drawing_.timeline.makespan;
        if (!block.action.is_compute() || !(share > 0)) return;
        columns = std::max(columns, static_cast<double>(to_string(block.action).size() + 1) / share);
      });
    }
    return columns;
  }

  std::size_t column(double time) const {
    if (drawing_.timeline.makespan == 0) return 0;
    return static_cast<std::size_t>(std::lround(time / drawing_.timeline.makespan * columns_));
  }

  void draw_row(std::ostream& out, int rank) const {
    Row row;
    row.resize(column(drawing_.timeline.makespan) + 1);
    for_each_block(drawing_, rank, [&](const Block& block) {
      if (block.action.is_compute()) fill(row, block);
    });
    const std::string name = concat("rank ", rank);
    out << name << std::string(margin_ - 2 - name.size(), ' ') << "| ";
    write(out, row);
    out << "\n";
  }

  void fill(Row& row, const Block& block) const {
    const std::size_t begin = column(block.span.start);
    const std::size_t end = column(block.span.end);
    const int colour = colour_of(drawing_, block.action).terminal;
    const std::string text = labelled_ ? to_string(block.action) : std::string(name_of(block.action.computation));
    for (std::size_t i = begin; i < end; ++i) {
      const std::size_t offset = i - begin;
      // The last column of a labelled block is a gap.
      const bool gap = labelled_ && i + 1 == end;
      row[i] = gap ? Column{} : Column{offset < text.size() ? text[offset] : '-', colour};
    }
  }

  void write(std::ostream& out, const Row& row) const {
    std::size_t length = row.size();
    while (length > 0 && row[length - 1].letter == ' ') --length;
    int colour = 0;
    for (std::size_t i = 0; i < length; ++i) {
      const Column& column = row[i];
      if (options_.colour && column.colour != colour) {
        out << paint(column.colour);
        colour = column.colour;
      }
      out << (options_.colour && column.letter == '-' ? ' ' : column.letter);
    }
    if (colour != 0) out << paint(0);
  }

  static std::string paint(int colour) { return colour == 0 ? "\033[0m" : concat("\033[30;48;5;", colour, "m"); }

  void draw_legend(std::ostream& out) const {
    const std::vector<Computation> legend = internal::legend_of(drawing_.schedule);
    for (const Computation computation : legend) {
      const std::string name(name_of(computation));
      const int colour = colour_of(drawing_, compute(/*stage=*/0, computation, 0)).terminal;
      out << (options_.colour ? paint(colour) + " " + name + " " + paint(0) : name) << " " << describe(computation)
          << (computation == legend.back() ? "\n" : "   ");
    }
    const std::string extras = internal::graph_text(drawing_.schedule);
    if (!extras.empty()) out << extras << "\n";
  }

  void draw_metrics(std::ostream& out) const {
    out << internal::metrics_text(drawing_, "   ") << "\n";
    if (drawing_.schedule.ranks() > kMostRankMetrics) return;
    for (int rank = 0; rank < drawing_.schedule.ranks(); ++rank) {
      const RankTimes& times = drawing_.timeline.ranks[static_cast<std::size_t>(rank)];
      out << "  rank " << rank << ": work " << number_text(times.work) << ", idle " << number_text(times.fill)
          << " at the start, " << number_text(times.drain) << " at the end";
      for (const auto& [other, time] : times.waiting) out << ", " << number_text(time) << " waiting for rank " << other;
      out << "; peak activations " << times.peak_activations << "\n";
    }
  }

  const Drawing& drawing_;
  const TextOptions& options_;
  std::size_t margin_;
  double columns_ = 0;
  bool labelled_ = true;
};

}  // namespace

void draw_text(std::ostream& out, const Drawing& drawing, const TextOptions& options) {
  TextPicture(drawing, options).draw(out);
}

}  // namespace penstock
