#include "penstock/schedule/draw.h"

#include <gtest/gtest.h>

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
