// Compares the verifier with the brute-force one on randomly mutated schedules: both must accept or both must reject
// each. Environment: PENSTOCK_SEED, PENSTOCK_CASES.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <iterator>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "penstock/schedule/csv.h"
#include "penstock/schedule/generators.h"
#include "penstock/schedule/passes.h"
#include "penstock/schedule/schedule.h"
#include "penstock/schedule/verify.h"
#include "tests/schedule/brute_force.h"

namespace penstock::internal::testing {
namespace {

std::uint64_t from_environment(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

// Gives the same numbers with every standard library, which std::uniform_int_distribution does not.
class Random {
 public:
  // Each case has its own seed, so that it does not depend on the number of cases.
  Random(std::uint64_t seed, std::uint64_t number) : engine_(seed * 1'000'003 + number) {}

  // Returns a number from `low` to `high`, inclusive.
  int between(int low, int high) {
    return low + static_cast<int>(engine_() % static_cast<std::uint64_t>(high - low + 1));
  }
  bool percent(int chance) { return between(1, 100) <= chance; }
  std::size_t index(std::size_t size) { return static_cast<std::size_t>(engine_() % size); }
  template <class Range>
  auto element_of(const Range& range) {
    return range[index(std::size(range))];
  }
  std::uint64_t next() { return engine_(); }

 private:
  std::mt19937_64 engine_;
};

StageGraph random_graph(Random& random, int stages) {
  StageGraph graph(stages);
  if (stages >= 3 && random.percent(50)) {
    for (int count = random.between(1, 3); count > 0; --count) {
      const int from = random.between(0, stages - 3);
      graph.add_edge(from, random.between(from + 2, stages - 1));
    }
  }
  if (stages >= 2 && random.percent(60)) {
    for (int count = random.between(1, 2); count > 0; --count) {
      std::vector<int> all(static_cast<std::size_t>(stages));
      std::iota(all.begin(), all.end(), 0);
      for (std::size_t i = all.size(); i > 1; --i) std::swap(all[i - 1], all[random.index(i)]);
      all.resize(static_cast<std::size_t>(random.between(2, std::min(stages, 3))));
      graph.share(all);
    }
  }
  return graph;
}

Schedule random_computations(Random& random) {
  const Generator& generator = generators()[random.index(generators().size())];
  const int ranks = random.between(1, 4);
  const int stages_per_rank = generator.stages_per_rank == 0 ? random.between(1, 3) : generator.stages_per_rank;
  const int microbatches = random.between(1, 5);
  if (random.percent(70)) {
    return generate(generator.name, {.ranks = ranks, .stages_per_rank = stages_per_rank, .microbatches = microbatches});
  }
  std::vector<int> rank_of_stage(static_cast<std::size_t>(ranks * stages_per_rank));
  for (int& rank : rank_of_stage) rank = random.between(0, ranks - 1);
  return generate(generator.name, Placement(rank_of_stage, ranks), microbatches);
}

// Removes all actions of one kind. A schedule may have reductions without shared sums, and the reverse.
Schedule without(const Schedule& schedule, Computation computation) {
  Schedule rest = schedule.without_actions();
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    for (const Action& action : schedule.actions(rank)) {
      if (action.computation != computation) rest.add(rank, action);
    }
  }
  return rest;
}

Schedule random_schedule(Random& random) {
  Schedule schedule = random_computations(random);
  schedule = schedule.with_graph(random_graph(random, schedule.stages()));
  if (random.percent(10)) schedule = drop_backwards(schedule);
  if (features_of(schedule).backward && random.percent(20)) {
    schedule = add_recomputation(schedule, {random.between(0, schedule.stages() - 1)});
  }
  if (random.percent(20)) return schedule;
  LowerOptions options;
  options.sharding = random.percent(50);
  options.reductions = random.percent(60);
  options.max_active_stages = random.between(1, 4);
  schedule = lower(schedule, options);
  if (random.percent(5)) return drop_backwards(schedule);
  if (random.percent(20)) {
    return without(schedule, random.percent(80) ? Computation::ReduceGrad : Computation::SumShared);
  }
  return schedule;
}

// Applies one to three random changes to the actions of a schedule, and records a note of each.
class Mutation {
 public:
  Mutation(const Schedule& original, Random& random) : original_(original), random_(random) {
    for (int rank = 0; rank < original.ranks(); ++rank) {
      lists_.emplace_back(original.actions(rank).begin(), original.actions(rank).end());
    }
    // Mostly one small change, so that enough of the schedules stay valid.
    int changes = random.percent(60) ? 1 : random.between(2, 3);
    while (changes > 0 && has_actions()) {
      if (change_once()) --changes;
    }
  }

  Schedule schedule() const {
    Schedule schedule = original_.without_actions();
    for (std::size_t rank = 0; rank < lists_.size(); ++rank) schedule.assign(static_cast<int>(rank), lists_[rank]);
    return schedule;
  }
  std::string notes() const { return notes_.str(); }

 private:
  using List = std::vector<Action>;

  bool has_actions() const {
    return std::any_of(lists_.begin(), lists_.end(), [](const List& list) { return !list.empty(); });
  }
  std::size_t any_rank_with_actions() {
    for (;;) {
      const std::size_t rank = random_.index(lists_.size());
      if (!lists_[rank].empty()) return rank;
    }
  }
  std::size_t other_rank(std::size_t rank) { return (rank + 1 + random_.index(lists_.size() - 1)) % lists_.size(); }

  std::ostream& note() { return notes_ << "  "; }

  // Returns false if the change was not possible or had no effect.
  bool change_once() {
    const std::size_t rank = any_rank_with_actions();
    const std::size_t at = any_position(rank);
    const int kind = random_.between(1, 100);
    if (kind <= 35) return swap(rank, at, at + 1);
    if (kind <= 40) return swap(rank, at, random_.index(lists_[rank].size()));
    if (kind <= 50) return move_near(rank, at);
    if (kind <= 54) return move(rank, at, rank);
    if (kind <= 57) return lists_.size() > 1 && move(rank, at, other_rank(rank));
    if (kind <= 67) return post_late();
    if (kind <= 71) return drop(rank, at);
    if (kind <= 76) return duplicate(rank, at);
    if (kind <= 85) return insert(rank);
    if (kind <= 92) return join_into_pair(rank, at);
    if (kind <= 94) return take_pair_apart(rank, at);
    return change_field(rank, at);
  }

  // Half of the time all kinds of actions in the list are equally likely, so that rare ones are chosen often enough.
  std::size_t any_position(std::size_t rank) {
    const List& list = lists_[rank];
    const std::size_t any = random_.index(list.size());
    if (random_.percent(50)) return any;
    std::map<Computation, std::vector<std::size_t>> by_kind;
    for (std::size_t at = 0; at < list.size(); ++at) by_kind[list[at].computation].push_back(at);
    const auto kind = std::next(by_kind.begin(), random_.between(0, static_cast<int>(by_kind.size()) - 1));
    return random_.element_of(kind->second);
  }

  bool swap(std::size_t rank, std::size_t a, std::size_t b) {
    List& list = lists_[rank];
    if (b >= list.size() || list[a] == list[b]) return false;
    note() << "rank " << rank << ": swap " << to_string(list[a]) << " at " << a << " and " << to_string(list[b])
           << " at " << b << '\n';
    std::swap(list[a], list[b]);
    return true;
  }

  Action take(std::size_t rank, std::size_t at) {
    const Action action = lists_[rank][at];
    lists_[rank].erase(lists_[rank].begin() + static_cast<std::ptrdiff_t>(at));
    return action;
  }
  void put(std::size_t rank, std::size_t at, const Action& action) {
    lists_[rank].insert(lists_[rank].begin() + static_cast<std::ptrdiff_t>(at), action);
  }

  bool move_near(std::size_t rank, std::size_t at) {
    const std::size_t first = at > 4 ? at - 4 : 0;
    const std::size_t last = std::min(at + 4, lists_[rank].size() - 1);
    return move_to(rank, at, rank, first + random_.index(last - first + 1));
  }
  bool move(std::size_t rank, std::size_t at, std::size_t to_rank) {
    const std::size_t places = lists_[to_rank].size() + (rank == to_rank ? 0 : 1);
    return move_to(rank, at, to_rank, random_.index(places));
  }
  bool move_to(std::size_t rank, std::size_t at, std::size_t to_rank, std::size_t to) {
    if (rank == to_rank && at == to) return false;
    const Action action = take(rank, at);
    put(to_rank, to, action);
    note() << "rank " << rank << ": move " << to_string(action) << " from " << at << " to " << to << " of rank "
           << to_rank << '\n';
    return true;
  }

  // Moves receives on all ranks directly before their uses, where blocking sends lead to deadlocks.
  bool post_late() {
    const int chance = random_.percent(50) ? 100 : random_.between(10, 90);
    bool moved = false;
    for (std::size_t rank = 0; rank < lists_.size(); ++rank) {
      // From the back, so that a receive is not moved twice.
      for (std::size_t at = lists_[rank].size(); at-- > 0;) {
        const Action recv = lists_[rank][at];
        if (!recv.is_recv() || !random_.percent(chance)) continue;
        std::size_t use = at + 1;
        while (use < lists_[rank].size() && !uses(lists_[rank][use], recv)) ++use;
        if (use >= lists_[rank].size() || use == at + 1) continue;
        take(rank, at);
        put(rank, use - 1, recv);
        moved = true;
      }
    }
    if (moved) note() << "post receives late, with chance " << chance << " %\n";
    return moved;
  }
  static bool uses(const Action& action, const Action& recv) {
    bool found = false;
    for_each_part(action, [&](const Action& part) {
      const bool fits = recv.computation == Computation::RecvForward ? is_forward(part) : makes_input_gradient(part);
      found = found || (fits && part.stage == recv.stage && part.microbatch == recv.microbatch);
    });
    return found;
  }

  bool drop(std::size_t rank, std::size_t at) {
    note() << "rank " << rank << ": drop " << to_string(lists_[rank][at]) << " at " << at << '\n';
    take(rank, at);
    return true;
  }

  bool duplicate(std::size_t rank, std::size_t at) {
    const std::size_t to_rank = random_.percent(70) ? rank : random_.index(lists_.size());
    const std::size_t to = random_.percent(50) && rank == to_rank ? at : random_.index(lists_[to_rank].size() + 1);
    const Action action = lists_[rank][at];
    note() << "rank " << rank << ": copy " << to_string(action) << " at " << at << " to " << to << " of rank "
           << to_rank << '\n';
    put(to_rank, to, action);
    return true;
  }

  // Inserts an action of any kind, mostly one that its stage could have.
  bool insert(std::size_t rank) {
    const auto own = original_.placement().stages_of(static_cast<int>(rank));
    Action action;
    action.stage = own.empty() || random_.percent(10) ? random_number(original_.stages()) : random_.element_of(own);
    action.microbatch = random_number(original_.microbatches());
    if (random_.percent(70) && action.stage >= 0 && action.stage < original_.stages()) {
      action.other_stage = action.stage + (random_.percent(50) ? 1 : -1);
    }
    action = with_computation(action, random_.percent(10) ? Computation::Overlap : random_plain());
    const std::size_t at = random_.percent(30) ? lists_[rank].size() : random_.index(lists_[rank].size() + 1);
    note() << "rank " << rank << ": insert " << to_string(action) << " at " << at << '\n';
    put(rank, at, action);
    return true;
  }

  // Joins a computation and the next one of the rank, which may not be adjacent, to a pair in the position of either;
  // sometimes two adjacent actions of any kind, which may not be parts of a pair.
  bool join_into_pair(std::size_t rank, std::size_t at) {
    List& list = lists_[rank];
    const bool any_two = random_.percent(10);
    const auto may_join = [&](const Action& action) {
      return !action.is_overlap() && (any_two || action.is_compute());
    };
    std::size_t next = at + 1;
    while (!any_two && next < list.size() && !list[next].is_compute()) ++next;
    if (next >= list.size() || !may_join(list[at]) || !may_join(list[next])) return false;
    const Action pair = overlap(list[at], list[next]);
    note() << "rank " << rank << ": join " << at << " and " << next << " to " << to_string(pair) << '\n';
    const bool early = random_.percent(50);
    take(rank, early ? next : at);
    list[early ? at : next - 1] = pair;
    return true;
  }

  bool take_pair_apart(std::size_t rank, std::size_t at) {
    const Action pair = lists_[rank][at];
    if (!pair.is_overlap()) return false;
    note() << "rank " << rank << ": split " << to_string(pair) << " at " << at << '\n';
    lists_[rank][at] = pair.first();
    put(rank, at + 1, pair.second());
    return true;
  }

  bool change_field(std::size_t rank, std::size_t at) {
    Action& action = lists_[rank][at];
    const Action before = action;
    const bool has_microbatch = action.is_compute() || action.is_message();
    switch (random_.between(0, 3)) {
      case 0: action.stage = random_number(original_.stages()); break;
      case 1:
        if (has_microbatch) action.microbatch = random_number(original_.microbatches());
        break;
      case 2:
        if (action.is_overlap() && random_.percent(50)) {
          action.other_microbatch = random_number(original_.microbatches());
        } else if (action.is_overlap() || action.is_message()) {
          action.other_stage = random_number(original_.stages());
        }
        break;
      default:
        if (action.is_overlap() && random_.percent(80)) {
          (random_.percent(50) ? action.first_part : action.second_part) = random_part();
        } else {
          action = with_computation(action, random_.percent(10) ? Computation::Overlap : random_plain());
        }
    }
    if (action == before) return false;
    note() << "rank " << rank << ": " << to_string(before) << " at " << at << " becomes " << to_string(action)
           << " (stage " << action.stage << ", microbatch " << action.microbatch << ", other stage "
           << action.other_stage << ", other microbatch " << action.other_microbatch << ")\n";
    return true;
  }

  // Mostly a valid index, sometimes one past the end, rarely one far out of range.
  int random_number(int count) {
    if (random_.percent(80)) return random_.between(0, count - 1);
    if (random_.percent(80)) return random_.percent(50) ? -1 : count;
    return random_.percent(50) ? std::numeric_limits<int>::min() : std::numeric_limits<int>::max();
  }
  Computation random_plain() { return random_.element_of(plain_computations()); }
  // Mostly a computation that is valid as a part.
  Computation random_part() {
    if (random_.percent(5)) return Computation::Overlap;
    return random_.percent(20) ? random_plain() : static_cast<Computation>(random_.between(0, 3));
  }

  // Returns another action of the same stage, with the fields that it needs.
  Action with_computation(const Action& action, Computation computation) {
    Action changed{.stage = action.stage, .computation = computation};
    const int microbatch =
        action.microbatch == kNone ? random_.between(0, original_.microbatches() - 1) : action.microbatch;
    const int other = action.other_stage == kNone ? random_number(original_.stages()) : action.other_stage;
    if (changed.is_compute() || changed.is_message()) changed.microbatch = microbatch;
    if (changed.is_overlap() || changed.is_message()) changed.other_stage = other;
    if (changed.is_overlap()) {
      changed.other_microbatch = random_number(original_.microbatches());
      changed.first_part = random_part();
      changed.second_part = random_part();
    }
    return changed;
  }

  const Schedule& original_;
  Random& random_;
  std::vector<List> lists_;
  std::ostringstream notes_;
};

std::string to_text(const Schedule& schedule, const Features& expected) {
  std::ostringstream out;
  out << "stages on ranks:";
  for (int rank : schedule.placement().ranks_by_stage()) out << ' ' << rank;
  out << "; microbatches: " << schedule.microbatches() << "; skips:";
  for (const Edge& edge : schedule.graph().skips()) out << ' ' << edge.from << "->" << edge.to;
  out << "; shared:";
  for (const std::vector<int>& group : schedule.graph().groups()) {
    out << " {";
    for (int stage : group) out << ' ' << stage;
    out << " }";
  }
  out << "\nexpected:" << (expected.backward ? " backward" : "") << (expected.communication ? " communication" : "")
      << (expected.sharding ? " sharding" : "") << (expected.reduction ? " reduction" : "")
      << (expected.shared_sums ? " shared_sums" : "") << "\n"
      << to_csv(schedule);
  return out.str();
}

std::string result_text(const std::optional<Violation>& violation) {
  if (!violation) return "valid";
  return "rank " + std::to_string(violation->rank) + ", position " + std::to_string(violation->position) + ": " +
         violation->what;
}
std::string result_text(const std::string& brute) {
  return brute.empty() ? "valid" : brute;
}

class Mutations : public ::testing::Test {
 protected:
  const std::uint64_t seed_ = from_environment("PENSTOCK_SEED", 20240229);
  const std::uint64_t cases_ = from_environment("PENSTOCK_CASES", 10'000);

  std::string name_of_case(std::uint64_t number) const {
    return "PENSTOCK_SEED=" + std::to_string(seed_) + ", case " + std::to_string(number);
  }
};

TEST_F(Mutations, AcceptsUnmutatedSchedules) {
  for (std::uint64_t number = 0; number < cases_; ++number) {
    Random random(seed_, number);
    const Schedule schedule = random_schedule(random);
    const Features expected = features_of(schedule);
    const auto verified = verify(schedule, expected);
    const std::string brute = brute_force(schedule, expected);
    ASSERT_TRUE(!verified && brute.empty()) << name_of_case(number) << "\nverify: " << result_text(verified)
                                            << "\nbrute force: " << result_text(brute) << "\n"
                                            << to_text(schedule, expected);
  }
}

TEST_F(Mutations, VerifierAndBruteForceAgree) {
  std::uint64_t accepted = 0;
  std::uint64_t rejected = 0;
  for (std::uint64_t number = 0; number < cases_; ++number) {
    Random random(seed_, number);
    const Schedule original = random_schedule(random);
    const Features expected = features_of(original);
    const Mutation mutation(original, random);
    const Schedule mutated = mutation.schedule();

    const std::string brute = brute_force(mutated, expected);
    const std::uint64_t other_order = random.next();
    ASSERT_EQ(brute, brute_force(mutated, expected, other_order))
        << "The brute force depends on the order of ranks. " << name_of_case(number) << ", order " << other_order
        << "\n"
        << mutation.notes() << to_text(mutated, expected);

    const auto verified = verify(mutated, expected);
    ASSERT_EQ(verified.has_value(), !brute.empty()) << name_of_case(number) << "\nverify: " << result_text(verified)
                                                    << "\nbrute force: " << result_text(brute) << "\n"
                                                    << mutation.notes() << to_text(mutated, expected);
    ++(brute.empty() ? accepted : rejected);
  }
  std::cout << "PENSTOCK_SEED=" << seed_ << ": of " << cases_ << " mutated schedules " << accepted << " accepted, "
            << rejected << " rejected by both\n";
  EXPECT_GE(accepted * 20, cases_) << "Too few mutated schedules stay valid to test anything.";
  EXPECT_GE(rejected * 20, cases_) << "Too few mutated schedules become invalid to test anything.";
}

// Tests the brute force itself on schedules that are short enough to check by hand. Stages 0 and 1 are on ranks 0 and
// 1.
struct Example {
  const char* csv;
  Features expected;
  // Part of the result; empty if the schedule is valid.
  const char* answer;
};

constexpr Features kForward{};
constexpr Features kBackward{.backward = true};
constexpr Features kMessages{.backward = true, .communication = true};
constexpr Features kForwardMessages{.communication = true};
constexpr Features kSharding{.sharding = true};
constexpr Features kReduction{.backward = true, .reduction = true};
constexpr Features kSums{.backward = true, .shared_sums = true};

TEST(BruteForce, IsRightOnShortSchedules) {
  const std::vector<Example> all = {
      {"0F0,0F1\n1F0,1F1\n", kForward, ""},
      {"0F0,0F1\n1F1,1F0\n", kForward, ""},
      {"0F0,0F1\n1F0,1F1,1F1\n", kForward, "a second forward"},
      {"0F0,0F1\n1F1\n", kForward, "stage 1 lacks a forward"},
      {"0F0,0B0\n1F0,1B0\n", kForward, "a backward in a forward schedule"},
      {"0F0\n1F0,1B0\n", kBackward, "stage 0 lacks an input gradient"},
      {"0F0,0B0\n1F0,1I0\n", kBackward, "stage 1 lacks a weight gradient"},
      {"0F0,0B0\n1F0,1I0,1W0\n", kBackward, ""},
      {"0F0,0B0\n1F0,1B0,1W0\n", kBackward, "a second weight gradient"},
      {"0F0,0B0\n1F0,1W0,1I0\n", kBackward, "before its input backward"},
      {"0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", kBackward, "stuck"},
      {"0F0,0F1,0B0,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n", kBackward, ""},
      {"0F0,0F1,0B0,0B1\n1F0,(1F1;1B1)OVERLAP_F_B,1B0\n", kBackward, ""},
      {"0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1\n", kBackward, ""},
      {"0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1F1,1B0,1B1\n", kBackward, "stuck"},
      {"0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", kMessages, ""},
      {"0F0,0SEND_F0,0B0,0RECV_B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", kMessages, "before its RECV_B"},
      {"0SEND_F0,0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", kMessages, "before its forward"},
      {"0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1RECV_F0,1B0,1SEND_B0\n", kMessages, "before its RECV_F"},
      {"0F0,0F1,0SEND_F0,0SEND_F1\n1RECV_F1,1F1,1RECV_F0,1F0\n", kForwardMessages, "stuck"},
      {"0F0,0F1,0SEND_F0,0SEND_F1\n1RECV_F1,1RECV_F0,1F1,1F0\n", kForwardMessages, ""},
      {"0F0,0SEND_F0\n1RECV_F0,1F0\n", kForward, "communication is not expected"},
      {"0UNSHARD,0F0,0RESHARD\n1UNSHARD,1F0,1RESHARD,1UNSHARD,1RESHARD\n", kSharding, ""},
      {"0UNSHARD,0F0,0RESHARD\n1UNSHARD,1F0\n", kSharding, "stage 1 stays unsharded"},
      {"0UNSHARD,0F0,0RESHARD\n1UNSHARD,1RESHARD,1F0\n", kSharding, "the stage is sharded"},
      {"0F0,0B0,0REDUCE_GRAD\n1F0,1B0,1REDUCE_GRAD\n", kReduction, ""},
      {"0F0,0B0,0REDUCE_GRAD\n1F0,1REDUCE_GRAD,1B0\n", kReduction, "before the last weight gradient"},
      {"0F0,0B0,0REDUCE_GRAD\n1F0,1B0\n", kReduction, "stage 1 is not reduced"},
      {"0F0,0B0,0SUM_SHARED\n1F0,1B0,1SUM_SHARED\n", kSums, ""},
      {"0F0,0B0,0SUM_SHARED\n1F0,1B0\n", kSums, "stuck: rank 0 at 0SUM_SHARED waits for rank 1 to join"},
      {"0F0,0B0\n1F0,1B0\n", kSums, "stage 0 is not summed"},
  };
  for (const Example& example : all) {
    const Schedule schedule = parse_csv(example.csv, {.source = "example", .skips = {}, .shared = {{0, 1}}});
    const std::string answer = brute_force(schedule, example.expected);
    if (example.answer[0] == '\0') {
      EXPECT_EQ(answer, "") << example.csv;
    } else {
      EXPECT_NE(answer.find(example.answer), std::string::npos)
          << example.csv << "found: " << answer << "\nshould say: " << example.answer;
    }
  }
}

TEST(BruteForce, FindsCollectivesInDifferentOrders) {
  StageGraph graph(4);
  graph.share({0, 1});
  graph.share({2, 3});
  Schedule schedule(loop_placement(/*ranks=*/2, /*stages_per_rank=*/2), graph, /*microbatches=*/1);
  for (int stage = 0; stage < 4; ++stage) schedule.add(stage % 2, forward(stage, 0));
  for (int stage = 3; stage >= 0; --stage) schedule.add(stage % 2, full_backward(stage, 0));
  Schedule same_order = schedule;
  for (int stage : {0, 2, 1, 3}) same_order.add(stage % 2, parameters(stage, Computation::SumShared));
  EXPECT_EQ(brute_force(same_order, kSums), "");
  Schedule different_order = schedule;
  for (int stage : {0, 2, 3, 1}) different_order.add(stage % 2, parameters(stage, Computation::SumShared));
  EXPECT_NE(brute_force(different_order, kSums).find("stuck"), std::string::npos);
}

}  // namespace
}  // namespace penstock::internal::testing
