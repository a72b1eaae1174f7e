#include "penstock/schedule/draw.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "penstock/schedule/csv.h"
#include "penstock/schedule/generators.h"
#include "penstock/schedule/passes.h"

namespace penstock::internal::testing {
namespace {

using Draw = std::function<void(std::ostream&, const Drawing&)>;

std::string drawn(const Schedule& schedule, const Draw& draw, bool all_actions = false,
                  const std::string& title = "A title") {
  const Costs costs;
  const Timeline timeline = simulate(schedule, costs);
  std::ostringstream out;
  draw(out, {schedule, timeline, costs, title, all_actions});
  return out.str();
}

std::size_t count_of(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

Draw as_text(TextOptions options = {}) {
  return [options](std::ostream& out, const Drawing& drawing) { draw_text(out, drawing, options); };
}

TEST(TextDrawing, HasBlocksOnAScaleOfTime) {
  EXPECT_EQ(drawn(gpipe(2, 2), as_text()),
            "A title: 2 ranks, 2 stages, 2 microbatches\n"
            "\n"
            "rank 0 | 0F0 0F1             0B0---- 0B1----\n"
            "rank 1 |     1F0 1F1 1B0---- 1B1----\n"
            "\n"
            "F forward   I input backward   W weight backward   B full backward\n"
            "makespan 9   bubble 33.3 %   peak activations 2\n"
            "  rank 0: work 6, idle 0 at the start, 0 at the end, 3 waiting for rank 1; peak activations 2\n"
            "  rank 1: work 6, idle 1 at the start, 2 at the end; peak activations 2\n");
}

TEST(TextDrawing, KeepsToTheWidthWithALetterForEachComputation) {
  const std::string text = drawn(gpipe(2, 40), as_text({.width = 80}));
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("rank")) {
      EXPECT_LE(line.size(), 80U) << line;
    }
  }
  EXPECT_EQ(text.find("0F0"), std::string::npos);
}

TEST(TextDrawing, PaintsOnlyWhenAsked) {
  EXPECT_EQ(drawn(gpipe(2, 2), as_text()).find('\033'), std::string::npos);
  EXPECT_NE(drawn(gpipe(2, 2), as_text({.colour = true})).find("\033[30;48;5;"), std::string::npos);
}

TEST(TextDrawing, NamesSkipsAndSharedStages) {
  const std::string text = drawn(parse_csv("0F0\n1F0\n2F0\n", {.skips = {{0, 2}}, .shared = {{0, 1}}}), as_text());
  EXPECT_NE(text.find("skip 0 -> 2   shared by stages 0 1"), std::string::npos) << text;
}

// PyTorch's spacing puts the weight gradients of ZBV on wrong ranks.
TEST(TraceDrawing, HasEveryActionOnItsOwnRankInItsCategory) {
  const Schedule schedule = lower(zbv_zero_bubble(4, 8));
  const auto trace = nlohmann::json::parse(drawn(schedule, draw_trace, /*all_actions=*/true));
  std::map<int, std::vector<std::string>> names;
  for (const auto& event : trace["traceEvents"]) {
    if (event["ph"] != "X") continue;
    names[event["pid"]].push_back(event["name"]);
    const Action action = parse_action(event["name"].get<std::string>());
    EXPECT_EQ(event["cat"], action.is_compute() ? "computation" : action.is_message() ? "communication" : "parameters");
  }
  for (int rank = 0; rank < 4; ++rank) {
    std::vector<std::string> expected;
    for (const Action& action : schedule.actions(rank)) expected.push_back(to_string(action));
    EXPECT_EQ(names[rank], expected) << "rank " << rank;
  }
}

TEST(TraceDrawing, PairsTheFlowOfEachMessage) {
  const auto trace = nlohmann::json::parse(drawn(lower(gpipe(3, 2)), draw_trace, true));
  std::map<std::string, int> flows;
  for (const auto& event : trace["traceEvents"]) {
    if (event["ph"] == "s") ++flows[event["id"]];
    if (event["ph"] == "f") --flows[event["id"]];
  }
  EXPECT_EQ(flows.size(), 8U);
  // A flow leads forward in time.
  std::map<std::string, double> sent;
  for (const auto& event : trace["traceEvents"]) {
    if (event["ph"] == "s") sent[event["id"]] = event["ts"];
  }
  for (const auto& event : trace["traceEvents"]) {
    if (event["ph"] == "f") {
      EXPECT_LE(sent[event["id"]], event["ts"].get<double>()) << event["id"];
    }
  }
  for (const auto& [id, balance] : flows) EXPECT_EQ(balance, 0) << id;
}

// Two ranks, of which the second has received two messages at overlapping times.
struct WithTransfers {
  Schedule schedule = lower(gpipe(2, 2));
  Costs costs = {};
  Timeline timeline = simulate(schedule);

  WithTransfers() {
    add(0, "0SEND_F0", {.span = {1, 1.5}, .peer = 1, .bytes = 64});
    add(1, "1RECV_F0", {.span = {1.5, 3.5}, .peer = 0, .bytes = 64});
    add(1, "1RECV_F1", {.span = {2.5, 4}, .peer = 0, .bytes = 32});
  }
  std::string drawn(const Draw& draw) const {
    std::ostringstream out;
    draw(out, {.schedule = schedule, .timeline = timeline, .costs = costs, .title = "measured"});
    return out.str();
  }

 private:
  void add(int rank, const std::string& name, Transfer transfer) {
    const auto actions = schedule.actions(rank);
    transfer.action = static_cast<std::size_t>(std::ranges::find(actions, parse_action(name)) - actions.begin());
    timeline.ranks[static_cast<std::size_t>(rank)].transfers.push_back(transfer);
  }
};

TEST(TraceDrawing, HasTransfersOnThreadsOfTheirOwn) {
  const auto trace = nlohmann::json::parse(WithTransfers().drawn(draw_trace));
  std::map<int, std::string> threads;
  std::map<std::string, nlohmann::json> found;
  for (const auto& event : trace["traceEvents"]) {
    if (event["name"] == "thread_name") threads[event["tid"]] = event["args"]["name"];
    if (event.value("cat", "") == "transfer") found[event["name"]] = event;
  }
  ASSERT_EQ(found.size(), 3U);
  EXPECT_EQ(found["1RECV_F0"]["ts"], 1500);
  EXPECT_EQ(found["1RECV_F0"]["dur"], 2000);
  EXPECT_EQ(found["1RECV_F0"]["pid"], 1);
  EXPECT_EQ(found["1RECV_F0"]["args"]["peer"], 0);
  EXPECT_EQ(found["1RECV_F0"]["args"]["bytes"], 64);
  EXPECT_EQ(threads[found["0SEND_F0"]["tid"]], "transfers sent");
  EXPECT_EQ(threads[found["1RECV_F0"]["tid"]], "transfers received");
  // The threads of a rank's actions have the numbers of the ranks. Events of a thread do not overlap.
  std::set<int> tids;
  for (const auto& [name, event] : found) tids.insert(event["tid"].get<int>());
  EXPECT_EQ(tids, (std::set<int>{2, 3, 4}));
}

TEST(SvgDrawing, HasALineForEachTransfer) {
  const WithTransfers measured;
  const std::string svg = measured.drawn(draw_svg);
  EXPECT_EQ(count_of(svg, R"(<rect class="t")"), 3U);
  EXPECT_EQ(count_of(svg, "<title>1RECV_F0 from rank 0, 1.5 to 3.5, 64 bytes</title>"), 1U) << svg;
  EXPECT_EQ(count_of(svg, "<title>0SEND_F0 to rank 1, 1 to 1.5, 64 bytes</title>"), 1U) << svg;
  EXPECT_EQ(count_of(svg, "transfers, sent (upper) and received (lower)"), 1U);
  const std::string simulated = drawn(measured.schedule, draw_svg);
  EXPECT_EQ(simulated.find("transfers"), std::string::npos);
}

TEST(HtmlDrawing, HasTheTransfersThatWereMeasured) {
  const WithTransfers measured;
  const std::string page = measured.drawn(draw_html);
  const std::size_t second = page.rfind(R"("transfers":)");
  ASSERT_NE(second, std::string::npos);
  const std::size_t begin = page.find('{', second);
  const auto transfers = nlohmann::json::parse(page.substr(begin, page.find('}', begin) + 1 - begin));
  const int kind = static_cast<int>(Computation::RecvForward);
  const nlohmann::json expected = {{"kind", {kind, kind}}, {"stage", {1, 1}},      {"microbatch", {0, 1}},
                                   {"start", {1.5, 2.5}},  {"end", {3.5, 4.0}},    {"other", {0, 0}},
                                   {"peer", {0, 0}},       {"bytes", {64.0, 32.0}}};
  EXPECT_EQ(transfers, expected);
  EXPECT_EQ(drawn(measured.schedule, draw_html).find(R"("transfers":{)"), std::string::npos);
}

TEST(SvgDrawing, HasABlockForEachComputationAndEscapesItsTitle) {
  const Schedule schedule = dual_pipe_v(2, 4);
  const std::string svg = drawn(schedule, draw_svg, false, "a < b & \"c\"");
  EXPECT_NE(svg.find("<title>a &lt; b &amp; &quot;c&quot;: "), std::string::npos);
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    for (const Action& action : schedule.actions(rank)) {
      for_each_part(action, [&](const Action& part) {
        EXPECT_EQ(count_of(svg, "<title>" + to_string(part) + " "), 1U) << to_string(part);
      });
    }
  }
}

TEST(Drawings, ShowRecomputations) {
  const Schedule schedule = add_recomputation(gpipe(1, 2));
  EXPECT_NE(drawn(schedule, as_text()).find("R recomputation"), std::string::npos);
  // Each kind of computation has a colour of its own.
  const std::string text = drawn(schedule, as_text({.colour = true}));
  std::set<std::string> colours;
  for (const std::string block : {"0F0", "0R0", "0B0"}) {
    const std::size_t at = text.find("m" + block);
    ASSERT_NE(at, std::string::npos) << text;
    colours.insert(text.substr(text.rfind('\033', at), at - text.rfind('\033', at)));
  }
  EXPECT_EQ(colours.size(), 3U);
  const std::string svg = drawn(schedule, draw_svg);
  EXPECT_NE(svg.find("<title>0R0 recomputation, rank 0, 2 to 3</title>"), std::string::npos) << svg;
  EXPECT_NE(drawn(schedule, draw_trace).find("\"name\":\"0R0\",\"cat\":\"computation\""), std::string::npos);
}

// Measured memory is drawn in place of the cost model's.
TEST(HtmlDrawing, HasTheMemoryThatWasMeasured) {
  const Schedule schedule = gpipe(1, 1);
  Costs costs;
  costs.stage.activation_bytes = 10;
  costs.rank.capacity = 40;
  Timeline timeline = simulate(schedule, costs);
  timeline.ranks[0].memory = {{0, 20}, {1, 30}, {2, 5}};
  timeline.ranks[0].peak_bytes = 35;
  add_memory(schedule, costs, timeline);
  std::ostringstream out;
  draw_html(out, {.schedule = schedule, .timeline = timeline, .costs = costs, .title = "GPipe"});
  EXPECT_NE(out.str().find(R"("memory":{"bytes":[20.0,30.0,5.0],"time":[0.0,1.0,2.0]})"), std::string::npos);
  EXPECT_NE(out.str().find(R"("peak_bytes":35.0)"), std::string::npos);
}

TEST(HtmlDrawing, CarriesItsDataSafely) {
  const std::string title = "</script><script>alert(1)</script>";
  const std::string page = drawn(dual_pipe_v(2, 4), draw_html, false, title);
  EXPECT_EQ(page.find(title), std::string::npos);
  EXPECT_EQ(page.find("@PENSTOCK_"), std::string::npos);
  const std::string mark = "id=\"data\">";
  const std::size_t begin = page.find(mark) + mark.size();
  const auto data = nlohmann::json::parse(page.substr(begin, page.find("</script>", begin) - begin));
  EXPECT_EQ(data["version"], 1);
  EXPECT_EQ(data["title"], title);
  EXPECT_EQ(data["timelines"][0]["ranks"].size(), 2U);
  EXPECT_EQ(data["timelines"][0]["makespan"], simulate(dual_pipe_v(2, 4)).makespan);
}

// PyTorch's table fails when there are fewer steps than ranks.
TEST(Table, HasALineForEachStepAlsoWhenThereAreFewerThanRanks) {
  EXPECT_EQ(table_of(parse_csv("0F0\n1F0\n2F0,2B0\n")),
            "step  rank 0  rank 1  rank 2\n"
            "0     0F0     1F0     2F0\n"
            "1                     2B0\n");
}

TEST(Table, ShowsTheSurroundingsOfAMark) {
  const std::string table =
      table_of(gpipe(20, 30), {.mark_rank = 10, .mark_position = 25, .steps_around = 1, .most_ranks = 2});
  EXPECT_EQ(table,
            "step  rank 9  rank 10\n"
            "…\n"
            "24    9F24    10F24\n"
            "25    9F25    [10F25]  <-- here\n"
            "26    9F26    10F26\n"
            "…\n"
            "(ranks 9 to 10 of 20)\n");
}

}  // namespace
}  // namespace penstock::internal::testing
