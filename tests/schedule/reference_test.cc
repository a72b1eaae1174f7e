// Compares schedules with torch.distributed.pipelining. tests/reference/schedules.py has run it and written its
// schedules into the folder that PENSTOCK_REFERENCE names.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <sstream>

#include "penstock/schedule/csv.h"
#include "penstock/schedule/generators.h"
#include "penstock/schedule/passes.h"
#include "penstock/schedule/simulate.h"
#include "penstock/schedule/verify.h"
#include "tests/schedule/expect.h"

namespace penstock::internal::testing {
namespace {

// A line "case NAME RANKS STAGES_PER_RANK MICROBATCHES WORD", and rows of CSV below it.
struct Case {
  std::string name;
  GenerateOptions options;
  std::string word;
  std::string rows;

  std::string text() const {
    return name + ", " + std::to_string(options.ranks) + " ranks, " + std::to_string(options.stages_per_rank) +
           " stages per rank, " + std::to_string(options.microbatches) + " microbatches " + word;
  }
  Schedule ours() const { return generate(name, options); }
};

std::vector<Case> read_cases(const std::string& file) {
  const char* const folder = std::getenv("PENSTOCK_REFERENCE");
  if (folder == nullptr)
    throw std::runtime_error("PENSTOCK_REFERENCE does not name the folder of tests/reference/schedules.py");
  std::ifstream in(std::filesystem::path(folder) / file);
  if (!in) throw std::runtime_error("there is no " + file + " in " + folder);
  std::vector<Case> cases;
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("case ")) {
      Case next;
      std::istringstream words(line.substr(5));
      words >> next.name >> next.options.ranks >> next.options.stages_per_rank >> next.options.microbatches >>
          next.word;
      cases.push_back(std::move(next));
    } else if (!line.starts_with('#')) {
      cases.back().rows += line + "\n";
    }
  }
  return cases;
}

TEST(Reference, RunsTheSameComputationsInTheSameOrder) {
  std::map<std::string, int> agreed;
  for (const Case& reference : read_cases("orders.txt")) {
    if (reference.word != "accepted") continue;
    SCOPED_TRACE(reference.text());
    ASSERT_EQ(to_csv(reference.ours()), reference.rows);
    ++agreed[reference.name];
  }
  for (const Generator& generator : generators()) EXPECT_GE(agreed[std::string(generator.name)], 20) << generator.name;
}

TEST(Reference, IsNoFasterWithTheNextNumberOfMicrobatchesThatItAccepts) {
  std::map<std::tuple<std::string, int, int>, std::map<int, bool>> accepted;
  const std::vector<Case> cases = read_cases("orders.txt");
  for (const Case& reference : cases) {
    accepted[{reference.name, reference.options.ranks, reference.options.stages_per_rank}]
            [reference.options.microbatches] = reference.word == "accepted";
  }
  int refused = 0;
  for (const Case& reference : cases) {
    if (reference.word == "accepted") continue;
    SCOPED_TRACE(reference.text());
    const Schedule schedule = reference.ours();
    ASSERT_FALSE(verify(schedule));
    const auto& known = accepted[{reference.name, reference.options.ranks, reference.options.stages_per_rank}];
    const auto next = std::find_if(known.upper_bound(reference.options.microbatches), known.end(),
                                   [](const auto& entry) { return entry.second; });
    if (next == known.end()) continue;
    Case larger = reference;
    larger.options.microbatches = next->first;
    ASSERT_LE(simulate(schedule).makespan, simulate(larger.ours()).makespan)
        << "against " << next->first << " microbatches";
    ++refused;
  }
  EXPECT_GE(refused, 100);
}

TEST(Reference, GathersAndFreesTheSameStages) {
  const std::vector<Case> cases = read_cases("sharding.txt");
  EXPECT_GE(cases.size(), 100U);
  for (const Case& reference : cases) {
    SCOPED_TRACE(reference.text());
    ASSERT_EQ(to_csv(add_sharding(reference.ours(), std::stoi(reference.word))), reference.rows);
  }
}

TEST(Reference, MergesTheSameBackwards) {
  const std::vector<Case> cases = read_cases("merged.txt");
  EXPECT_GE(cases.size(), 50U);
  for (const Case& reference : cases) {
    SCOPED_TRACE(reference.text());
    ASSERT_EQ(to_csv(merge_backwards(reference.ours())), reference.rows);
  }
}

// Lowering equals PyTorch's, except for the positions of messages.
TEST(Reference, LowersToTheSameWithoutMessages) {
  for (const Case& reference : read_cases("lowered.txt")) {
    SCOPED_TRACE(reference.text());
    const auto without_messages = [](const Schedule& schedule) {
      Schedule result = schedule.without_actions();
      for (int rank = 0; rank < schedule.ranks(); ++rank) {
        for (const Action& action : schedule.actions(rank)) {
          if (!action.is_message()) result.add(rank, action);
        }
      }
      return result;
    };
    ASSERT_EQ(to_csv(without_messages(lower(reference.ours()))), to_csv(without_messages(parse_csv(reference.rows))));
  }
}

TEST(Reference, IsNeverFasterWithItsPositionsOfMessages) {
  Random random = seeded(3);
  std::map<std::string, int> faster;
  std::map<std::string, int> deadlocks;
  int cases = 0;
  for (const Case& reference : read_cases("lowered.txt")) {
    SCOPED_TRACE(reference.text());
    const Schedule ours = lower(reference.ours());
    const Schedule theirs = parse_csv(reference.rows);
    // PyTorch's deferred receives deadlock when sends block; its eager ones do not.
    if (verify(theirs)) ++deadlocks[reference.word];
    for (int trial = 0; trial < 6; ++trial) {
      Costs costs;
      const auto draw = [&] { return between(random, 1, 40) / 10.0; };
      if (trial >= 2) costs.stage = {.forward = draw(), .input = draw(), .weight = draw()};
      if (trial >= 3) {
        for (int stage = 0; stage < ours.stages(); ++stage)
          costs.stages.push_back({.forward = draw(), .input = draw(), .weight = draw()});
      }
      costs.link.latency = trial == 0 ? 0.1 : draw();
      if (trial >= 4) costs.link.bandwidth = draw();
      const double our_time = simulate(ours, costs).makespan;
      const double their_time = simulate(theirs, costs).makespan;
      ASSERT_LE(our_time, their_time * (1 + 1e-12)) << "latency " << costs.link.latency;
      ++cases;
      if (our_time < their_time * (1 - 1e-9)) ++faster[reference.word];
    }
  }
  std::cout << "faster than PyTorch's placement, of " << cases / 2 << " simulations each: eager " << faster["eager"]
            << ", deferred " << faster["deferred"] << "; it deadlocks if sends block: " << deadlocks["deferred"]
            << " deferred\n";
  EXPECT_EQ(deadlocks["eager"], 0);
  EXPECT_GT(deadlocks["deferred"], 0);
  EXPECT_GT(faster["eager"], 0);
  EXPECT_GT(faster["deferred"], 0);
}

// Writes files for tests/reference/load_csv.py, which loads them in PyTorch and writes them again.
TEST(Reference, IsGivenFilesToLoad) {
  const char* const folder = std::getenv("PENSTOCK_CSV");
  ASSERT_NE(folder, nullptr);
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  Random random = seeded(4);
  for (const Generator& generator : generators()) {
    // A schedule without backwards is refused by PyTorch's validation.
    if (generator.name == "ForwardOnly") continue;
    for (int trial = 0; trial < 25; ++trial) {
      const int ranks = between(random, 1, 6);
      const int per_rank = generator.stages_per_rank == 0 ? between(random, 1, 3) : generator.stages_per_rank;
      const int microbatches = between(random, 1, 12);
      const Schedule schedule =
          generate(generator.name, {.ranks = ranks, .stages_per_rank = per_rank, .microbatches = microbatches});
      const std::string stem = std::string(generator.name) + "-" + std::to_string(ranks) + "-" +
                               std::to_string(per_rank) + "-" + std::to_string(microbatches);
      std::ofstream(std::filesystem::path(folder) / (stem + ".compute.csv")) << to_csv(schedule);
      std::ofstream(std::filesystem::path(folder) / (stem + ".lowered.csv")) << to_csv(lower(schedule));
    }
  }
}

TEST(ReferenceFiles, LoadAsTheSameSchedules) {
  const char* const folder = std::getenv("PENSTOCK_CSV");
  ASSERT_NE(folder, nullptr);
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    const std::string end = ".reference.csv";
    if (!name.ends_with(end)) continue;
    const auto read = [&](const std::string& ending) {
      std::ifstream in(std::filesystem::path(folder) / (name.substr(0, name.size() - end.size()) + ending),
                       std::ios::binary);
      std::ostringstream text;
      text << in.rdbuf();
      return text.str();
    };
    EXPECT_EQ(parse_csv(read(end)), parse_csv(read(".compute.csv"))) << name;
    ++files;
  }
  EXPECT_GE(files, 50);
}

}  // namespace
}  // namespace penstock::internal::testing
