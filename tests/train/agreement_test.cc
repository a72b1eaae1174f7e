// Checks that the processes of a run make before its first step.
#include "penstock/train/agreement.h"

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/transport/ranks.h"

namespace penstock::internal::testing {
namespace {

constexpr int kRanks = 3;
constexpr auto kTimeout = std::chrono::seconds(60);
using Options = std::map<std::string, std::string>;

// Returns the message that each rank has thrown, empty if none.
std::vector<std::string> errors_of(Carrier carrier, const std::function<void(const Agreement&, int rank)>& act) {
  World world(carrier, kRanks);
  std::vector<std::string> errors(kRanks);
  world.run([&](Transport& transport) {
    const Agreement agreement(&transport, kTimeout);
    try {
      act(agreement, transport.rank());
    } catch (const std::exception& error) {
      errors[static_cast<std::size_t>(transport.rank())] = error.what();
    }
  });
  return errors;
}

class Agreements : public ::testing::TestWithParam<Carrier> {};
INSTANTIATE_TEST_SUITE_P(Carriers, Agreements, ::testing::Values(Carrier::Threads, Carrier::Gloo),
                         [](const auto& one) { return name_of(one.param); });

TEST_P(Agreements, RanksFailTogetherWithTheErrorOfTheLowest) {
  EXPECT_EQ(errors_of(GetParam(),
                      [](const Agreement& agreement, int rank) {
                        agreement.fail_together([] {});
                        agreement.fail_together([&] {
                          if (rank > 0) throw std::runtime_error("no disk on " + std::to_string(rank));
                        });
                      }),
            (std::vector<std::string>{"rank 1: no disk on 1", "no disk on 1", "no disk on 2"}));
}

TEST_P(Agreements, EqualOptionsAreAccepted) {
  EXPECT_EQ(errors_of(GetParam(),
                      [](const Agreement& agreement, int) {
                        agreement.require_same_options({{"steps", "3"}, {"seed", "0"}});
                        agreement.require_same_options({});
                      }),
            std::vector<std::string>(kRanks));
}

TEST_P(Agreements, DifferentOptionsAreListedOnAllRanks) {
  const std::string expected =
      "the ranks have different options.\n"
      "  learning-rate: 0.1 on rank 1, 0.004 on rank 0\n"
      "  clip: not given on rank 2, 1 on rank 0\n"
      "  shard: true on rank 2, not given on rank 0\n"
      "  Hint: start all ranks with the same command line and configuration file.";
  EXPECT_EQ(errors_of(GetParam(),
                      [](const Agreement& agreement, int rank) {
                        const std::vector<Options> options{
                            {{"learning-rate", "0.004"}, {"clip", "1"}},
                            {{"learning-rate", "0.1"}, {"clip", "1"}},
                            {{"learning-rate", "0.004"}, {"shard", "true"}},
                        };
                        agreement.require_same_options(options[static_cast<std::size_t>(rank)]);
                      }),
            std::vector<std::string>(kRanks, expected));
}

TEST_P(Agreements, LongListsOfDifferencesAreTruncated) {
  const std::vector<std::string> errors = errors_of(GetParam(), [](const Agreement& agreement, int rank) {
    Options options;
    for (char name = 'a'; name < 'a' + 12; ++name) options[std::string(1, name)] = rank == 1 ? "1" : "0";
    agreement.require_same_options(options);
  });
  EXPECT_EQ(errors[0].find("  j: 1 on rank 1, 0 on rank 0\n  … and 2 more\n  Hint: "), errors[0].find("  j: "));
  EXPECT_EQ(errors[0].find("  k: "), std::string::npos);
}

TEST(Agreement, OfOneProcessRethrowsItsError) {
  const Agreement alone(nullptr, kTimeout);
  alone.require_same_options({{"steps", "3"}});
  EXPECT_THROW(alone.fail_together([] { throw std::invalid_argument("bad"); }), std::invalid_argument);
}

}  // namespace
}  // namespace penstock::internal::testing
