#include "penstock/cli/program/picture.h"

#include <algorithm>
#include <map>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "penstock/schedule/draw/xml.h"

namespace penstock::internal::cli {
namespace {

constexpr int kBoxWidth = 420;
constexpr int kLine = 18;
constexpr int kPadding = 12;
constexpr int kGap = 26;
constexpr int kLeft = 24;
// Distance between the arrows of skip connections, on the right.
constexpr int kLane = 22;
constexpr int kLabel = 300;

std::string shortened(const std::string& text, std::size_t most) {
  return text.size() <= most ? text : text.substr(0, most - 3) + "...";
}

// Returns the names, separated by commas, in at most `most` lines of `width` characters.
std::vector<std::string> lines_of(const std::vector<std::string>& names, std::size_t width, std::size_t most) {
  std::vector<std::string> lines(1);
  for (std::size_t i = 0; i < names.size(); ++i) {
    const std::string word = names[i] + (i + 1 == names.size() ? "" : ", ");
    if (lines.back().size() + word.size() > width && !lines.back().empty()) lines.emplace_back();
    lines.back() += word;
  }
  if (lines.size() > most) {
    lines.resize(most);
    lines.back() = shortened(lines.back(), width - 4) + " ...";
  }
  return lines;
}

struct Box {
  int top = 0;
  int height = 0;
  std::vector<std::string> lines = {};
};

}  // namespace

void draw_pipe(std::ostream& out, const Pipe& pipe) {
  const PipeInfo& info = pipe.info();
  const std::vector<std::map<int, std::string>> replicated = pipe.replicated_params();
  // Values that are sent along each edge.
  std::map<std::pair<int, int>, std::vector<const PipeInfo::BoundaryValue*>> edges;
  for (const PipeInfo::BoundaryValue& value : info.boundary_values) edges[{value.from, value.to}].push_back(&value);

  std::vector<Box> boxes;
  int top = 48;
  for (std::size_t i = 0; i < info.stages.size(); ++i) {
    const PipeInfo::Stage& stage = info.stages[i];
    Box box{.top = top};
    box.lines = lines_of(stage.modules, 56, 3);
    box.lines.push_back(statistics_text(stage));
    box.height = kLine * static_cast<int>(box.lines.size() + 1) + 2 * kPadding - 4;
    const auto next = edges.find({static_cast<int>(i), static_cast<int>(i) + 1});
    const std::size_t labels = next == edges.end() ? 0 : next->second.size();
    top += box.height + kGap + kLine * static_cast<int>(labels);
    boxes.push_back(std::move(box));
  }
  const int shared_top = top;
  top += kLine * static_cast<int>(replicated.size());
  int skips = 0;
  for (const auto& [edge, values] : edges) skips += edge.second > edge.first + 1 ? 1 : 0;
  const int width = kLeft + kBoxWidth + kLane * (skips + 1) + (skips > 0 ? kLabel : 40);

  out << R"(<svg xmlns="http://www.w3.org/2000/svg" width=")" << width << "\" height=\"" << top + 16
      << R"(" font-family="ui-sans-serif, system-ui, sans-serif" font-size="13">)"
      << "\n<style>:root{color-scheme:light dark}"
         "text{fill:#1b1f24}.box{fill:#e8f0fb;stroke:#3a6ea5}.line{stroke:#3a6ea5;fill:none}.name{font-weight:600}"
         ".small{font-size:11px;fill:#57606a}.head{fill:#3a6ea5}.ground{fill:#fff}"
         "@media (prefers-color-scheme:dark){text{fill:#e6edf3}.box{fill:#15263b;stroke:#6ea8e0}.line{stroke:#6ea8e0}"
         ".small{fill:#9da7b3}.head{fill:#6ea8e0}.ground{fill:#0d1117}}</style>\n"
         "<defs><marker id=\"head\" viewBox=\"0 0 8 8\" refX=\"7\" refY=\"4\" markerWidth=\"7\" markerHeight=\"7\" "
         "orient=\"auto\"><path class=\"head\" d=\"M0 0 8 4 0 8z\"/></marker></defs>\n"
      << "<rect class=\"ground\" width=\"100%\" height=\"100%\"/>\n"
      << "<text class=\"name\" x=\"" << kLeft << "\" y=\"28\">" << xml_text(info.name) << "</text>\n";
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    const Box& box = boxes[i];
    out << "<rect class=\"box\" rx=\"6\" x=\"" << kLeft << "\" y=\"" << box.top << "\" width=\"" << kBoxWidth
        << "\" height=\"" << box.height << "\"/>\n<text class=\"name\" x=\"" << kLeft + kPadding << "\" y=\""
        << box.top + kPadding + 10 << "\">stage " << i << "</text>\n";
    for (std::size_t line = 0; line < box.lines.size(); ++line) {
      out << "<text" << (line + 1 == box.lines.size() ? " class=\"small\"" : "") << " x=\"" << kLeft + kPadding
          << "\" y=\"" << box.top + kPadding + 10 + kLine * static_cast<int>(line + 1) << "\">"
          << xml_text(box.lines[line]) << "</text>\n";
    }
  }
  int lane = 0;
  for (const auto& [edge, values] : edges) {
    const Box& from = boxes[static_cast<std::size_t>(edge.first)];
    const Box& to = boxes[static_cast<std::size_t>(edge.second)];
    const auto label = [&](int x, int y, const PipeInfo::BoundaryValue& value) {
      out << "<text class=\"small\" x=\"" << x << "\" y=\"" << y << "\">"
          << xml_text(shortened(value.name + " " + value.type, 52)) << "</text>\n";
    };
    if (edge.second == edge.first + 1) {
      const int x = kLeft + 40;
      out << "<path class=\"line\" marker-end=\"url(#head)\" d=\"M" << x << " " << from.top + from.height << "V"
          << to.top << "\"/>\n";
      int y = from.top + from.height + 20;
      for (const PipeInfo::BoundaryValue* value : values) {
        label(x + 12, y, *value);
        y += kLine;
      }
      continue;
    }
    ++lane;
    const int right = kLeft + kBoxWidth;
    const int x = right + kLane * lane;
    const int begin = from.top + from.height / 2;
    const int end = to.top + to.height / 2 - 5 * lane;
    out << "<path class=\"line\" marker-end=\"url(#head)\" d=\"M" << right << " " << begin << "H" << x - 8
        << "q8 0 8 8V" << end - 8 << "q0 8 -8 8H" << right << "\"/>\n";
    int y = begin + 18 + kLine * lane;
    for (const PipeInfo::BoundaryValue* value : values) {
      label(right + kLane * (skips + 1), y, *value);
      y += kLine;
    }
  }
  int y = shared_top + 4;
  for (const std::map<int, std::string>& shared : replicated) {
    out << "<text class=\"small\" x=\"" << kLeft << "\" y=\"" << y << "\">shared: " << xml_text(shared.begin()->second)
        << " by stages";
    for (const auto& [stage, name] : shared) out << (stage == shared.begin()->first ? " " : ", ") << stage;
    out << "</text>\n";
    y += kLine;
  }
  out << "</svg>\n";
}

}  // namespace penstock::internal::cli
