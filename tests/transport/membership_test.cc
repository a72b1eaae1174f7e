#include "penstock/transport/membership.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

#include "tests/tensor/values.h"
#include "tests/transport/ranks.h"

namespace penstock::internal::testing {
namespace {

using std::chrono::milliseconds;

// Connects the first `present` of `ranks` ranks, each with its own options, and returns what they throw.
std::vector<Thrown> connect(int present, int ranks, milliseconds timeout, const std::vector<RankOptions>& values = {}) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<Thrown> found(static_cast<std::size_t>(present));
  on_threads(present, [&](int rank) {
    const auto index = static_cast<std::size_t>(rank);
    Membership self{.rank = rank, .ranks = ranks, .timeout = timeout};
    if (!values.empty()) self.agreed = values[index];
    found[index] = thrown_by([&] { require_all_ranks(store, self); });
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
  const Thrown expected = timeout(2, std::string("rank 2 of 3 has not connected within 0.2 s") + kStartHint);
  EXPECT_EQ(connect(2, 3, kShort), std::vector<Thrown>(2, expected));
}

TEST(Membership, NamesAllRanksThatHaveNotConnected) {
  EXPECT_EQ(connect(1, 4, kShort).front(),
            timeout(1, std::string("ranks 1, 2, 3 of 4 have not connected within 0.2 s") + kStartHint));
  EXPECT_EQ(
      connect(1, 20, kShort).front(),
      timeout(1, std::string("ranks 1, 2, 3, 4, 5, 6, 7, 8, … of 20 have not connected within 0.2 s") + kStartHint));
}

TEST(Membership, NamesTheOptionThatDiffersOnAllRanks) {
  const auto error_of = [](const std::string& difference) {
    return Thrown{.threw = true,
                  .why = TransportError::Why::Aborted,
                  .peer = 2,
                  .what = "the ranks have different options.\n  " + difference + kOptionsHint};
  };
  const RankOptions common{{"batch", "4"}, {"lr", "0.1"}};
  EXPECT_EQ(connect(3, 3, kLong, {common, common, {{"batch", "4"}, {"lr", "0.01"}}}),
            std::vector<Thrown>(3, error_of("lr: 0.01 on rank 2, 0.1 on rank 0")));
  EXPECT_EQ(connect(3, 3, kLong, {common, common, {{"lr", "0.1"}}}),
            std::vector<Thrown>(3, error_of("batch: not given on rank 2, 4 on rank 0")));
  // Names and values may be any text.
  const RankOptions odd{{"text", "a:b\n'"}, {"", ""}};
  EXPECT_EQ(connect(3, 3, kLong, {odd, odd, odd}), std::vector<Thrown>(3));
}

TEST(Membership, RequiresTheSameWorldSizeOnAllRanks) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<Thrown> found(2);
  on_threads(2, [&](int rank) {
    found[static_cast<std::size_t>(rank)] =
        thrown_by([&] { require_all_ranks(store, {.rank = rank, .ranks = 2 + rank, .timeout = kLong}); });
  });
  for (const Thrown& thrown : found) {
    EXPECT_EQ(thrown.what,
              std::string("the ranks have different options.\n  WORLD_SIZE: 3 on rank 1, 2 on rank 0") + kOptionsHint);
  }
}

constexpr const char* kOtherJob =
    "rank 1 has another job token than rank 0 at MASTER_ADDR:MASTER_PORT, which belongs to another job.\n  Hint: give "
    "all "
    "ranks of a job the same PENSTOCK_JOB_TOKEN, and each job a MASTER_PORT of its own.";

TEST(Membership, RefusesAnotherJobAtOnceAndReportsItToWaitingRanks) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> lines;
  std::vector<Thrown> found(2);
  on_threads(2, [&](int rank) {
    Membership self{.rank = rank, .ranks = 2, .token = JobToken(rank == 0 ? "ours" : "theirs")};
    self.timeout = rank == 0 ? kShort : kLong;
    if (rank == 0) self.on_waiting = [&](const std::string& line) { lines.push_back(line); };
    found[static_cast<std::size_t>(rank)] = thrown_by([&] { require_all_ranks(store, self); });
  });
  EXPECT_EQ(found[1], (Thrown{.threw = true, .why = TransportError::Why::Aborted, .peer = 0, .what = kOtherJob}));
  EXPECT_EQ(found[0],
            timeout(1, std::string("rank 1 of 2 has not connected within 0.2 s.\n  a process with another job "
                                   "token was refused as rank 1") +
                           kStartHint));
  EXPECT_EQ(lines,
            std::vector<std::string>{"rank 0 waits for rank 1 of 2; a process with another job token was refused as "
                                     "rank 1 (0 s of 0.2 s)"});
}

TEST(Membership, IsCompleteAlthoughAProcessOfAnotherJobWasRefused) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<Thrown> found(3);
  std::atomic<bool> is_refused = false;
  on_threads(3, [&](int thread) {
    const auto index = static_cast<std::size_t>(thread);
    const JobToken token(thread == 2 ? "theirs" : "ours");
    while (thread == 1 && !is_refused) std::this_thread::sleep_for(milliseconds(1));
    found[index] = thrown_by([&] {
      require_all_ranks(store, {.rank = thread == 2 ? 1 : thread, .ranks = 2, .token = token, .timeout = kLong});
    });
    if (thread == 2) is_refused = true;
  });
  EXPECT_EQ(found[0], Thrown());
  EXPECT_EQ(found[1], Thrown());
  EXPECT_EQ(found[2].what, kOtherJob);
}

// Returns the part of the store that the first handshake of the job with token "ours" uses, without signatures.
c10::intrusive_ptr<c10d::Store> first_handshake_store(const c10::intrusive_ptr<c10d::Store>& store,
                                                      const std::string& part = "members") {
  const std::string fingerprint = JobToken("ours").sign(std::array<std::string, 1>{"fingerprint"});
  return c10::make_intrusive<c10d::PrefixStore>("job/" + fingerprint + "/handshake/1/" + part, store);
}

Thrown unproven(int rank) {
  return {
      .threw = true,
      .why = TransportError::Why::Aborted,
      .peer = rank,
      .what =
          "rank " + std::to_string(rank) +
          " cannot prove that it knows the job token: its values in the store were written by another process, or in "
          "an earlier run.\n  Hint: let only the hosts of the job reach MASTER_PORT."};
}

Membership of_job(int rank) {
  return {.rank = rank, .ranks = 2, .token = JobToken("ours"), .timeout = kLong};
}

TEST(Membership, RefusesValuesThatAreNotSigned) {
  const std::vector<std::string> values{"", "0123456789", std::string(200, 'x')};
  for (const std::string& value : values) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    first_handshake_store(store)->set("member/1", value);
    EXPECT_EQ(thrown_by([&] { require_all_ranks(store, of_job(0)); }), unproven(1));
  }
}

TEST(Membership, IgnoresAFailureThatIsNotSigned) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  first_handshake_store(store)->set("failure", std::string("nonsense"));
  Membership self = of_job(0);
  self.timeout = kShort;
  EXPECT_EQ(thrown_by([&] { require_all_ranks(store, self); }),
            timeout(1, std::string("rank 1 of 2 has not connected within 0.2 s") + kStartHint));
}

// An attacker may replay some or all values of an earlier run.
TEST(Membership, RefusesReplayedValues) {
  const auto earlier = c10::make_intrusive<c10d::HashStore>();
  on_threads(2, [&](int rank) { require_all_ranks(earlier, of_job(rank)); });
  const auto values_of = [&](const std::vector<std::string>& keys) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    for (const std::string& key : keys) {
      first_handshake_store(store)->set(key, first_handshake_store(earlier)->get(key));
    }
    return store;
  };
  const auto some = values_of({"member/1", "proof/1"});
  EXPECT_EQ(thrown_by([&] { require_all_ranks(some, of_job(0)); }), unproven(1));
  // The value of rank 0 is overwritten as soon as it is published.
  const auto all = values_of({"proof/0", "proof/1"});
  Thrown found;
  on_threads(2, [&](int thread) {
    if (thread == 0) {
      found = thrown_by([&] { require_all_ranks(all, of_job(0)); });
      return;
    }
    const auto handshake = first_handshake_store(all);
    handshake->wait({"member/0"}, kLong);
    for (const char* key : {"member/0", "member/1"}) handshake->set(key, first_handshake_store(earlier)->get(key));
  });
  EXPECT_EQ(found, unproven(0));
}

TEST(Membership, ReturnsASignedStore) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<c10::intrusive_ptr<c10d::Store>> stores(2);
  on_threads(2, [&](int rank) {
    stores[static_cast<std::size_t>(rank)] =
        require_all_ranks(store, {.rank = rank, .ranks = 2, .token = JobToken("ours"), .timeout = kLong});
  });
  stores[0]->set("address", std::string("here"));
  EXPECT_EQ(stores[1]->get_to_str("address"), "here");
  EXPECT_EQ(stores[1]->compareSet("address", std::string("here"), std::string("there")), "there");
  EXPECT_EQ(stores[0]->get_to_str("address"), "there");
  EXPECT_EQ(stores[0]->add("number", 2), 2);
  EXPECT_FALSE(stores[0]->hasExtendedApi());
  EXPECT_THROW(stores[0]->multiGet({"address"}), std::logic_error);
  const auto raw = first_handshake_store(store, "session");
  const std::string signed_value = raw->get_to_str("address");
  for (const std::string& value : {std::string("elsewhere"), signed_value + " ", signed_value.substr(1)}) {
    raw->set("address", value);
    expect_error<std::runtime_error>([&] { stores[1]->get("address"); },
                                     "'address' in the store was not written by a rank of this job.");
  }
  raw->set("other", signed_value);
  expect_error<std::runtime_error>([&] { stores[1]->get("other"); },
                                   "'other' in the store was not written by a rank of this job.");
}

TEST(Texts, SurviveJoiningAndSplitting) {
  const std::vector<std::string> texts{"", "a:b", std::string(3, '\0'), "7:"};
  EXPECT_EQ(split_texts(join_texts(texts)), texts);
  for (const char* wrong : {"x", "1", "1:", "2:a", "-1:a", "99999999999999999999:a", ":a", "1:a3"}) {
    EXPECT_THROW(split_texts(wrong), std::invalid_argument) << wrong;
  }
}

TEST(JobToken, IsRandomAndSignsListsOfTexts) {
  const JobToken token = JobToken::random();
  EXPECT_EQ(token.secret().size(), 64U);
  EXPECT_NE(token.secret(), JobToken::random().secret());
  const std::vector<std::string> one{"a", "bc"};
  const std::vector<std::string> other{"ab", "c"};
  EXPECT_TRUE(token.verifies(one, token.sign(one)));
  EXPECT_NE(token.sign(one), token.sign(other));
  EXPECT_FALSE(token.verifies(other, token.sign(one)));
  EXPECT_FALSE(token.verifies(one, token.sign(one).substr(1)));
  EXPECT_FALSE(JobToken().verifies(one, token.sign(one)));
}

TEST(Membership, NamesTheRanksThatItWaitsFor) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> lines;
  thrown_by([&] {
    require_all_ranks(store, {.rank = 0, .ranks = 2, .timeout = kShort, .on_waiting = [&](const std::string& line) {
                                lines.push_back(line);
                              }});
  });
  EXPECT_EQ(lines, std::vector<std::string>{"rank 0 waits for rank 1 of 2 (0 s of 0.2 s)"});
}

TEST(Membership, IsRequiredByATransport) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_EQ(thrown_by([&] { c10d_transport(store, 0, 2, {.timeout = kShort}); }),
            timeout(1, std::string("rank 1 of 2 has not connected within 0.2 s") + kStartHint));
  std::vector<Thrown> found(2);
  on_threads(2, [&](int rank) {
    found[static_cast<std::size_t>(rank)] = thrown_by([&] {
      c10d_transport(c10::make_intrusive<c10d::PrefixStore>("other", store), rank, 2,
                     {.agreed = {{"lr", std::to_string(rank)}}});
    });
  });
  for (const Thrown& thrown : found)
    EXPECT_NE(thrown.what.find("\n  lr: 1 on rank 1, 0 on rank 0\n"), std::string::npos);
}

}  // namespace
}  // namespace penstock::internal::testing
