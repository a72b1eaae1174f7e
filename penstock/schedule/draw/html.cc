#include <algorithm>
#include <nlohmann/json.hpp>
#include <ostream>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "penstock/schedule/draw/blocks.h"
#include "penstock/schedule/draw/page.h"
#include "penstock/schedule/draw/xml.h"
#include "penstock/schedule/memory.h"

namespace penstock {
namespace {

using internal::Block;
using internal::for_each_block;
using nlohmann::json;

json transfer_data(const Drawing& drawing, int rank) {
  json data = json::object();
  for (const char* const name : {"kind", "stage", "microbatch", "start", "end", "other", "peer", "bytes"}) {
    data[name] = json::array();
  }
  for (const Transfer& transfer : drawing.timeline.ranks[static_cast<std::size_t>(rank)].transfers) {
    const Action& message = drawing.schedule.actions(rank)[transfer.action];
    data["kind"].push_back(static_cast<int>(message.computation));
    data["stage"].push_back(message.stage);
    data["microbatch"].push_back(message.microbatch);
    data["start"].push_back(transfer.span.start);
    data["end"].push_back(transfer.span.end);
    data["other"].push_back(message.other_stage);
    data["peer"].push_back(transfer.peer);
    data["bytes"].push_back(transfer.bytes);
  }
  return data;
}

json rank_data(const Drawing& drawing, int rank) {
  const RankTimes& times = drawing.timeline.ranks[static_cast<std::size_t>(rank)];
  json kind = json::array();
  json stage = json::array();
  json microbatch = json::array();
  json start = json::array();
  json end = json::array();
  json other = json::array();
  json pair = json::array();
  bool has_pairs = false;
  for_each_block(drawing, rank, [&](const Block& block) {
    kind.push_back(static_cast<int>(block.action.computation));
    stage.push_back(block.action.stage);
    microbatch.push_back(block.action.microbatch);
    start.push_back(block.span.start);
    end.push_back(block.span.end);
    other.push_back(block.action.other_stage);
    pair.push_back(block.pair);
    has_pairs |= block.pair != 0;
  });
  json waiting = json::object();
  for (const auto& [other_rank, time] : times.waiting) waiting[std::to_string(other_rank)] = time;
  json data = {{"peak_activations", times.peak_activations},
               {"work", times.work},
               {"idle", {{"fill", times.fill}, {"drain", times.drain}, {"waiting", waiting}}},
               {"kind", std::move(kind)},
               {"stage", std::move(stage)},
               {"microbatch", std::move(microbatch)},
               {"start", std::move(start)},
               {"end", std::move(end)},
               {"other", std::move(other)}};
  // Without sizes of activations in the costs, there is no peak memory to show.
  const auto& ranks = drawing.timeline.ranks;
  const bool bytes_known = std::ranges::any_of(ranks, [](const RankTimes& each) { return each.peak_bytes > 0; });
  if (bytes_known) {
    json memory_time = json::array();
    json memory_bytes = json::array();
    const std::vector<MemoryStep> steps =
        times.memory.empty() ? memory_over_time(drawing.schedule, drawing.timeline, drawing.costs, rank) : times.memory;
    for (const MemoryStep& step : steps) {
      memory_time.push_back(step.time);
      memory_bytes.push_back(step.bytes);
    }
    data["peak_bytes"] = times.peak_bytes;
    data["memory"] = {{"time", std::move(memory_time)}, {"bytes", std::move(memory_bytes)}};
    const double capacity = drawing.costs.of_rank(rank).capacity;
    if (capacity > 0) data["capacity"] = capacity;
  }
  if (has_pairs) data["pair"] = std::move(pair);
  if (!times.transfers.empty()) data["transfers"] = transfer_data(drawing, rank);
  return data;
}

json timeline_data(const Drawing& drawing) {
  json ranks = json::array();
  for (int rank = 0; rank < drawing.schedule.ranks(); ++rank) ranks.push_back(rank_data(drawing, rank));
  return {{"name", drawing.name},
          {"makespan", drawing.timeline.makespan},
          {"bubble", drawing.timeline.bubble},
          {"longest_span", drawing.timeline.longest_span},
          {"ranks", std::move(ranks)}};
}

json page_data(const Drawing& drawing) {
  const Schedule& schedule = drawing.schedule;
  json kinds = json::array();
  for (const Computation computation : plain_computations()) kinds.push_back(name_of(computation));
  json edges = json::array();
  for (const Edge& edge : schedule.graph().skips()) edges.push_back({edge.from, edge.to});
  json shared = json::array();
  for (const auto& group : schedule.graph().groups()) shared.push_back(group);
  json timelines = json::array({timeline_data(drawing)});
  if (drawing.second_timeline != nullptr) {
    const Drawing second{.schedule = schedule,
                         .timeline = *drawing.second_timeline,
                         .costs = drawing.costs,
                         .title = drawing.title,
                         .all_actions = drawing.all_actions,
                         .name = drawing.second_name};
    timelines.push_back(timeline_data(second));
  }
  const auto placement = schedule.placement().ranks_by_stage();
  return {{"version", 1},
          {"title", drawing.title},
          {"subtitle", size_text(drawing.schedule)},
          {"stages", schedule.stages()},
          {"microbatches", schedule.microbatches()},
          {"placement", std::vector<int>(placement.begin(), placement.end())},
          {"edges", std::move(edges)},
          {"shared", std::move(shared)},
          {"kinds", std::move(kinds)},
          {"timelines", std::move(timelines)},
          {"unit", drawing.unit},
          {"curve", {{"name", drawing.curve_name}, {"first", drawing.curve_first_step}, {"values", drawing.curve}}}};
}

// Writes JSON inside a script element, where a '<' could end the element.
void write_escaped(std::ostream& out, std::string_view text) {
  for (std::size_t next = text.find('<'); next != std::string_view::npos; next = text.find('<')) {
    out << text.substr(0, next) << "\\u003c";
    text.remove_prefix(next + 1);
  }
  out << text;
}

}  // namespace

void draw_html(std::ostream& out, const Drawing& drawing) {
  constexpr std::string_view kTitle = "@PENSTOCK_TITLE@";
  constexpr std::string_view kData = "@PENSTOCK_DATA@";
  const std::string_view page = internal::page_template();
  const std::size_t title = page.find(kTitle);
  const std::size_t data = page.find(kData, title + kTitle.size());
  if (title == std::string_view::npos || data == std::string_view::npos)
    throw std::logic_error("page.html has no placeholder for the title or the data");
  out << page.substr(0, title) << internal::xml_text(drawing.title)
      << page.substr(title + kTitle.size(), data - title - kTitle.size());
  write_escaped(out, page_data(drawing).dump(-1, ' ', false, json::error_handler_t::replace));
  out << page.substr(data + kData.size());
}

}  // namespace penstock
