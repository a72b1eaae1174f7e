#include <algorithm>
#include <cmath>
#include <ostream>
#include <string>
#include <vector>

#include "penstock/base/text.h"
#include "penstock/schedule/draw/blocks.h"
#include "penstock/schedule/draw/xml.h"

namespace penstock {
namespace {

using internal::Block;
using internal::colour_of;
using internal::for_each_block;
using internal::number_text;
using internal::xml_text;

// Lengths in pixels.
constexpr double kMargin = 24;
constexpr double kHead = 56;
constexpr double kRow = 26;
constexpr double kBlock = 20;
constexpr double kLetter = 6.2;
constexpr double kWidest = 16000;
// Height of a line of transfers. A rank has one for sends, and one for receives below it.
constexpr double kTransfer = 4;

// Returns the width of the timeline in pixels: enough for a label on the shortest computation, but at most kWidest.
double pixels_of(const Drawing& drawing) {
  double pixels = 0;
  for (int rank = 0; rank < drawing.schedule.ranks(); ++rank) {
    for_each_block(drawing, rank, [&](const Block& block) {
      const double share = (block.span.end - block.span.start) / drawing.timeline.makespan;
      if (!block.action.is_compute() || !(share > 0)) return;
      pixels = std::max(pixels, (kLetter * static_cast<double>(to_string(block.action).size()) + 8) / share);
    });
  }
  return std::min(pixels, kWidest);
}

// Returns the distance of the ticks on the time axis: a round number, at least 80 pixels.
double tick_step(double makespan, double pixels) {
  const double rough = makespan * 80 / std::max(pixels, 80.0);
  const double power = std::pow(10, std::floor(std::log10(rough)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= rough) return factor * power;
  }
  return 10 * power;
}

class TransferLines {
 public:
  explicit TransferLines(const Drawing& drawing)
      : drawing_(drawing), shown_(internal::has_transfers(drawing.timeline)) {}

  // Returns the height that a row has in addition.
  double height() const { return shown_ ? 2 * kTransfer + 5 : 0; }

  // Draws the transfers of a rank from `y` on.
  template <class XOf>
  void draw(std::ostream& out, int rank, double y, const XOf& x_of) const {
    for (const Transfer& transfer : drawing_.timeline.ranks[static_cast<std::size_t>(rank)].transfers) {
      const Action& message = drawing_.schedule.actions(rank)[transfer.action];
      const double x = x_of(transfer.span.start);
      out << R"(<rect class="t" x=")" << number_text(x) << R"(" y=")" << y + (message.is_send() ? 0 : kTransfer + 1)
          << R"(" width=")" << number_text(std::max(x_of(transfer.span.end) - x, 0.5)) << R"(" height=")" << kTransfer
          << R"(" fill=")" << colour_of(drawing_, message).hex << R"("><title>)"
          << internal::transfer_text(message, transfer) << ", " << number_text(transfer.span.start) << " to "
          << number_text(transfer.span.end) << ", " << number_text(transfer.bytes) << " bytes</title></rect>\n";
    }
  }

  // Returns the text of the legend; empty without transfers.
  std::string legend() const {
    return shown_ ? "lines below a rank: transfers, sent (upper) and received (lower)" : "";
  }

 private:
  const Drawing& drawing_;
  bool shown_;
};

}  // namespace

void draw_svg(std::ostream& out, const Drawing& drawing) {
  const Schedule& schedule = drawing.schedule;
  const double makespan = drawing.timeline.makespan;
  const double pixels = pixels_of(drawing);
  const auto x_of = [&](double time) { return makespan > 0 ? time / makespan * pixels : 0; };
  const double left =
      kMargin + kLetter * static_cast<double>(("rank " + std::to_string(schedule.ranks() - 1)).size()) + 16;
  const TransferLines transfers(drawing);
  const double row = kRow + transfers.height();
  const double axis = kHead + row * schedule.ranks();
  const double width = std::max(left + pixels + kMargin, 720.0);
  const double height = axis + 76;

  out << R"(<svg xmlns="http://www.w3.org/2000/svg" width=")" << number_text(width) << R"(" height=")"
      << number_text(height) << R"(" viewBox="0 0 )" << number_text(width) << " " << number_text(height)
      << R"(" role="img">)" << "\n"
      << "<title>" << xml_text(drawing.title) << ": " << size_text(drawing.schedule) << "</title>\n"
      << "<style>text{font:11px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#1c2733}"
         ".h{font-size:15px;font-weight:600}.q{fill:#5b6875}.l{stroke:#d5dbe1}.b text{fill:#10151a;text-anchor:middle}"
         ".p{fill:none;stroke:#1c2733;stroke-width:1.2}.bg{fill:#fff}.r{fill:#f1f4f7}"
         "@media(prefers-color-scheme:dark){text{fill:#e6ebf0}.q{fill:#9aa7b4}.l{stroke:#37424d}.bg{fill:#12171c}"
         ".r{fill:#1b2228}.p{stroke:#e6ebf0}}</style>\n"
      << R"(<rect class="bg" width="100%" height="100%"/>)" << "\n"
      << R"(<text class="h" x=")" << kMargin << R"(" y="26">)" << xml_text(drawing.title) << "</text>\n"
      << R"(<text class="q" x=")" << kMargin << R"(" y="43">)" << size_text(drawing.schedule) << " · "
      << internal::metrics_text(drawing, " · ") << "</text>\n";

  const double step = tick_step(makespan, pixels);
  const int ticks = step > 0 ? static_cast<int>(std::min(makespan / step * (1 + 1e-9), kWidest)) : 0;
  for (int tick = 0; tick <= ticks; ++tick) {
    const double x = left + x_of(tick * step);
    out << R"(<line class="l" x1=")" << number_text(x) << R"(" x2=")" << number_text(x) << R"(" y1=")" << kHead
        << R"(" y2=")" << axis + 4 << R"("/><text class="q" x=")" << number_text(x) << R"(" y=")" << axis + 17
        << R"(" text-anchor="middle">)" << number_text(tick * step) << "</text>\n";
  }

  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    const double top = kHead + row * rank + (kRow - kBlock) / 2;
    out << R"(<text class="q" x=")" << kMargin << R"(" y=")" << top + 14 << R"(">rank )" << rank << "</text>\n"
        << R"(<rect class="r" x=")" << number_text(left) << R"(" y=")" << top << R"(" width=")" << number_text(pixels)
        << R"(" height=")" << kBlock << R"("/><g class="b">)" << "\n";
    int open_pair = 0;
    double pair_left = 0;
    for_each_block(drawing, rank, [&](const Block& block) {
      const double x = left + x_of(block.span.start);
      const double w = x_of(block.span.end) - x_of(block.span.start);
      const std::string text = to_string(block.action);
      const std::string title = "<title>" + text + " " + std::string(describe(block.action.computation)) + ", rank " +
                                std::to_string(rank) + ", " + number_text(block.span.start) + " to " +
                                number_text(block.span.end) + "</title>";
      if (!block.action.is_compute()) {
        out << R"(<path class="p" d="M)" << number_text(x) << " " << top + kBlock - 5 << R"(v5">)" << title
            << "</path>\n";
        return;
      }
      out << R"(<rect x=")" << number_text(x + 0.5) << R"(" y=")" << top << R"(" width=")"
          << number_text(std::max(w - 1, 0.2)) << R"(" height=")" << kBlock << R"(" rx="2" fill=")"
          << colour_of(drawing, block.action).hex << R"(">)" << title << "</rect>";
      if (w >= kLetter * static_cast<double>(text.size())) {
        out << R"(<text x=")" << number_text(x + w / 2) << R"(" y=")" << top + 14 << R"(">)" << text << "</text>";
      }
      if (block.pair != 0 && block.pair != open_pair) {
        open_pair = block.pair;
        pair_left = x;
      } else if (block.pair != 0) {
        out << R"(<rect class="p" x=")" << number_text(pair_left) << R"(" y=")" << top - 1 << R"(" width=")"
            << number_text(x + w - pair_left) << R"(" height=")" << kBlock + 2 << R"(" rx="3"/>)";
      }
      out << "\n";
    });
    out << "</g>\n";
    transfers.draw(out, rank, top + kBlock + 2, [&](double time) { return left + x_of(time); });
  }

  double x = kMargin;
  for (const Computation computation : internal::legend_of(schedule)) {
    const std::string label = std::string(name_of(computation)) + " " + std::string(describe(computation));
    out << R"(<rect x=")" << x << R"(" y=")" << axis + 38 << R"(" width="14" height="14" rx="2" fill=")"
        << colour_of(drawing, compute(/*stage=*/0, computation, 0)).hex << R"("/><text x=")" << x + 20 << R"(" y=")"
        << axis + 49 << R"(">)" << label << "</text>\n";
    x += 44 + 7 * static_cast<double>(label.size());
  }
  std::vector<std::string> notes = {internal::graph_text(schedule), transfers.legend()};
  std::erase(notes, "");
  const std::string extras = xml_text(internal::join(notes, "   "));
  if (!extras.empty())
    out << R"(<text class="q" x=")" << kMargin << R"(" y=")" << axis + 68 << R"(">)" << extras << "</text>\n";
  out << "</svg>\n";
}

}  // namespace penstock
