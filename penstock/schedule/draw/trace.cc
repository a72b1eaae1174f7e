// Writes the trace event format of Chrome's tracing and Perfetto: a process for each rank, a complete event for each
// action, and a flow from each send to the computation that uses the message. Measured transfers are complete events on
// further threads of the process.
#include <map>
#include <nlohmann/json.hpp>
#include <ostream>
#include <utility>
#include <vector>

#include "penstock/schedule/draw/blocks.h"

namespace penstock {
namespace {

using internal::Block;
using internal::for_each_block;

constexpr double kMicrosecondsPerUnit = 1000;

std::string json_text(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// Times, by stage and microbatch, at which a received activation (in F) or gradient (in I or B) is first used.
struct UseTimes {
  std::vector<double> forward;
  std::vector<double> backward;

  explicit UseTimes(const Drawing& drawing) : forward(drawing.schedule.cells()), backward(drawing.schedule.cells()) {
    for (int rank = 0; rank < drawing.schedule.ranks(); ++rank) {
      for_each_block(drawing, rank, [&](const Block& block) {
        if (!block.action.is_compute()) return;
        const std::size_t cell = drawing.schedule.cell(block.action.stage, block.action.microbatch);
        if (is_forward(block.action)) forward[cell] = block.span.start;
        if (makes_input_gradient(block.action)) backward[cell] = block.span.start;
      });
    }
  }
};

// Calls write(text) with the events of a rank's transfers. Events of a thread must not overlap, so there are as many
// threads as are needed for that. Thread ids are distinct across ranks: those from `first_thread` on are used, and the
// next free one is returned.
template <class Write>
int write_transfers(const Drawing& drawing, int rank, int first_thread, const Write& write) {
  const std::vector<Transfer>& transfers = drawing.timeline.ranks[static_cast<std::size_t>(rank)].transfers;
  const std::vector<int> lanes = internal::transfer_lanes(drawing, rank);
  std::map<std::pair<bool, int>, int> threads;
  for (std::size_t i = 0; i < transfers.size(); ++i) {
    threads.try_emplace({drawing.schedule.actions(rank)[transfers[i].action].is_send(), lanes[i]}, 0);
  }
  for (auto& [lane, thread] : threads) {
    thread = first_thread++;
    write({{"name", "thread_name"},
           {"ph", "M"},
           {"pid", rank},
           {"tid", thread},
           {"args", {{"name", lane.first ? "transfers sent" : "transfers received"}}}});
  }
  for (std::size_t i = 0; i < transfers.size(); ++i) {
    const Transfer& transfer = transfers[i];
    const Action& message = drawing.schedule.actions(rank)[transfer.action];
    write({{"name", to_string(message)},
           {"cat", "transfer"},
           {"ph", "X"},
           {"ts", transfer.span.start * kMicrosecondsPerUnit},
           {"dur", (transfer.span.end - transfer.span.start) * kMicrosecondsPerUnit},
           {"pid", rank},
           {"tid", threads.at({message.is_send(), lanes[i]})},
           {"args",
            {{"stage", message.stage},
             {"microbatch", message.microbatch},
             {"peer", transfer.peer},
             {"bytes", transfer.bytes}}}});
  }
  return first_thread;
}

std::string_view category_of(const Action& action) {
  if (action.is_compute()) return "computation";
  return action.is_message() ? "communication" : "parameters";
}

}  // namespace

void draw_trace(std::ostream& out, const Drawing& drawing) {
  const Schedule& schedule = drawing.schedule;
  out << R"({"displayTimeUnit":"ms","otherData":{"version":1,"title":)" << json_text(drawing.title) << R"(,"makespan":)"
      << nlohmann::json(drawing.timeline.makespan).dump() << R"(,"bubble":)"
      << nlohmann::json(drawing.timeline.bubble).dump() << "},\n\"traceEvents\":[\n";
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    out << R"({"name":"process_name","ph":"M","pid":)" << rank << R"(,"args":{"name":"rank )" << rank << "\"}},\n"
        << R"({"name":"process_sort_index","ph":"M","pid":)" << rank << R"(,"args":{"sort_index":)" << rank << "}},\n";
  }
  // The thread of a rank's actions has the number of the rank.
  int next_thread = schedule.ranks();
  const UseTimes uses(drawing);
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    for_each_block(drawing, rank, [&](const Block& block) {
      const Action& action = block.action;
      const double start = block.span.start * kMicrosecondsPerUnit;
      const double length = (block.span.end - block.span.start) * kMicrosecondsPerUnit;
      out << R"({"name":")" << to_string(action) << R"(","cat":")" << category_of(action) << R"(","ph":"X","ts":)"
          << nlohmann::json(start).dump() << R"(,"dur":)" << nlohmann::json(length).dump() << R"(,"pid":)" << rank
          << R"(,"tid":)" << rank << R"(,"args":{"computation":")" << describe(action.computation) << R"(","stage":)"
          << action.stage;
      if (action.microbatch != kNone) out << R"(,"microbatch":)" << action.microbatch;
      if (block.pair != 0) out << R"(,"pair":)" << block.pair;
      out << "}},\n";
      if (!action.is_message()) return;
      // The flow leads from the send to the computation that uses the message.
      const Action send = action.is_send() ? action : counterpart(action);
      const std::size_t cell = schedule.cell(action.stage, action.microbatch);
      const double used = (action.carries_activation() ? uses.forward : uses.backward)[cell] * kMicrosecondsPerUnit;
      out << R"({"name":")" << to_string(send) << R"(","cat":"communication","ph":")"
          << (action.is_send() ? "s" : "f\",\"bp\":\"e") << R"(","id":")" << to_string(send) << R"(","ts":)"
          << nlohmann::json(action.is_send() ? start : used).dump() << R"(,"pid":)" << rank << R"(,"tid":)" << rank
          << "},\n";
    });
    next_thread =
        write_transfers(drawing, rank, next_thread, [&](const nlohmann::json& event) { out << event.dump() << ",\n"; });
  }
  // A final event, so that every event before it can end in a comma.
  out << R"({"name":"end","ph":"i","s":"g","ts":)"
      << nlohmann::json(drawing.timeline.makespan * kMicrosecondsPerUnit).dump() << R"(,"pid":0,"tid":0})"
      << "\n]}\n";
}

}  // namespace penstock
