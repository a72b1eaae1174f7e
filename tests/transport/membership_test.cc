#include "penstock/transport/membership.h"

#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

#include "tests/transport/ranks.h"

namespace penstock::testing {
namespace {

using std::chrono::milliseconds;

// What each of the first ranks throws when it connects, with its own values.
std::vector<Thrown> connect(int come, int ranks, milliseconds timeout, const std::vector<RankOptions>& values = {}) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<Thrown> found(static_cast<std::size_t>(come));
  on_threads(come, [&](int rank) {
    const auto at = static_cast<std::size_t>(rank);
    Membership own{.rank = rank, .ranks = ranks, .timeout = timeout};
    if (!values.empty()) own.agreed = values[at];
    found[at] = thrown_by([&] { require_all_ranks(*store, own); });
  });
  return found;
}

constexpr milliseconds kLong = std::chrono::seconds(120);
constexpr milliseconds kShort{200};
constexpr const char* kOptionsHint = "\n  Hint: start all ranks with the same command line and configuration file.";
constexpr const char* kStartHint =
    ".\n  Hint: start every rank with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE, or raise the timeout.";

TEST(Membership, IsCompleteWhenAllRanksHaveConnected) {
  EXPECT_EQ(connect(1, 1, kLong), std::vector<Thrown>(1));
  EXPECT_EQ(connect(4, 4, kLong), std::vector<Thrown>(4));
  EXPECT_EQ(connect(3, 3, milliseconds::max(), {{{"lr", "1"}}, {{"lr", "1"}}, {{"lr", "1"}}}), std::vector<Thrown>(3));
}

TEST(Membership, NamesTheRankThatHasNotConnectedOnAllOthers) {
  const Thrown expected = late(2, std::string("rank 2 of 3 has not connected within 0.2 s") + kStartHint);
  EXPECT_EQ(connect(2, 3, kShort), std::vector<Thrown>(2, expected));
}

TEST(Membership, NamesAllRanksThatHaveNotConnected) {
  EXPECT_EQ(connect(1, 4, kShort).front(),
            late(1, std::string("ranks 1, 2, 3 of 4 have not connected within 0.2 s") + kStartHint));
  EXPECT_EQ(connect(1, 20, kShort).front(),
            late(1, std::string("ranks 1, 2, 3, 4, 5, 6, 7, 8, … of 20 have not connected within 0.2 s") + kStartHint));
}

TEST(Membership, NamesTheOptionThatDiffersOnAllRanks) {
  const auto error_of = [](const std::string& what) {
    return Thrown{.threw = true,
                  .why = TransportError::Why::Aborted,
                  .peer = 2,
                  .what = "the ranks have different options.\n  " + what + kOptionsHint};
  };
  const RankOptions common{{"batch", "4"}, {"lr", "0.1"}};
  EXPECT_EQ(connect(3, 3, kLong, {common, common, {{"batch", "4"}, {"lr", "0.01"}}}),
            std::vector<Thrown>(3, error_of("lr: 0.01 on rank 2, 0.1 on rank 0")));
  EXPECT_EQ(connect(3, 3, kLong, {common, common, {{"lr", "0.1"}}}),
            std::vector<Thrown>(3, error_of("batch: not given on rank 2, 4 on rank 0")));
  // A value may be anything.
  const RankOptions odd{{"text", "a:b\n'"}, {"", ""}};
  EXPECT_EQ(connect(3, 3, kLong, {odd, odd, odd}), std::vector<Thrown>(3));
}

TEST(Membership, IsOfRanksWithTheSameNumberOfRanks) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<Thrown> found(2);
  on_threads(2, [&](int rank) {
    found[static_cast<std::size_t>(rank)] =
        thrown_by([&] { require_all_ranks(*store, {.rank = rank, .ranks = 2 + rank, .timeout = kLong}); });
  });
  for (const Thrown& one : found) {
    EXPECT_EQ(one.what,
              std::string("the ranks have different options.\n  WORLD_SIZE: 3 on rank 1, 2 on rank 0") + kOptionsHint);
  }
}

TEST(Membership, SaysWhomItWaitsFor) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> lines;
  thrown_by([&] {
    require_all_ranks(*store, {.rank = 0, .ranks = 2, .timeout = kShort, .on_waiting = [&](const std::string& line) {
                                 lines.push_back(line);
                               }});
  });
  EXPECT_EQ(lines, std::vector<std::string>{"rank 0 waits for rank 1 of 2 (0 s of 0.2 s)"});
}

TEST(Membership, IsAskedForByATransport) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_EQ(thrown_by([&] { c10d_transport(store, 0, 2, {.timeout = kShort}); }),
            late(1, std::string("rank 1 of 2 has not connected within 0.2 s") + kStartHint));
  std::vector<Thrown> found(2);
  on_threads(2, [&](int rank) {
    found[static_cast<std::size_t>(rank)] = thrown_by([&] {
      c10d_transport(c10::make_intrusive<c10d::PrefixStore>("other", store), rank, 2,
                     {.agreed = {{"lr", std::to_string(rank)}}});
    });
  });
  for (const Thrown& one : found) EXPECT_NE(one.what.find("\n  lr: 1 on rank 1, 0 on rank 0\n"), std::string::npos);
}

}  // namespace
}  // namespace penstock::testing
