// The simulator runs one rank after the other, each until it waits for a message or a collective that has not happened
// yet; that event wakes it again. Times do not depend on the order in which ranks run, except for the choice of
// samples.
#include "penstock/schedule/simulate.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/schedule/error.h"
#include "penstock/schedule/liveness.h"
#include "penstock/schedule/simulate/network.h"
#include "penstock/schedule/simulate/sampler.h"
#include "penstock/schedule/source.h"
#include "penstock/schedule/verify.h"

namespace penstock {
namespace {

using internal::concat;
using internal::CostSampler;
using internal::Direction;
using internal::Network;

class Simulator {
 public:
  Simulator(const Schedule& schedule, const Features& features, const Costs& costs, const CostSamples& samples,
            std::uint64_t seed)
      : schedule_(schedule),
        graph_(schedule.graph()),
        implicit_messages_(!features.communication),
        sampler_(schedule.stages(), costs, samples, seed),
        network_(schedule, costs, sampler_),
        forward_end_(schedule.cells(), kNotYet),
        backward_end_(schedule.cells(), kNotYet),
        ranks_(static_cast<std::size_t>(schedule.ranks())) {
    add_collectives();
    timeline_.ranks.resize(static_cast<std::size_t>(schedule.ranks()));
    for (int rank = 0; rank < schedule.ranks(); ++rank) {
      times(rank).spans.reserve(schedule.actions(rank).size());
      state(rank).clock = costs.start_of(rank);
    }
  }

  Timeline run() {
    for (int rank = schedule_.ranks() - 1; rank >= 0; --rank) queue_.push_back(rank);
    while (!queue_.empty()) {
      const int rank = queue_.back();
      queue_.pop_back();
      advance(rank);
    }
    finish();
    return std::move(timeline_);
  }

 private:
  static constexpr double kNotYet = -1;

  struct Rank {
    enum class State : std::uint8_t { Running, WaitingForInput, InCollective };
    // Index of the next action.
    std::size_t next = 0;
    double clock = 0;
    double first_start = kNotYet;
    double last_end = 0;
    // End of the last computation or collective; the makespan does not include messages after it.
    double done = 0;
    State state = State::Running;
    // True in the middle of a pair, when its first part has run.
    bool first_part_done = false;
    double pair_start = 0;
    // Time spent in collectives since the last computation, by the rank that joined last.
    std::map<int, double> collective_stalls = {};
  };

  // The SUM_SHARED of a group of stages that share parameters.
  struct Collective {
    std::vector<int> ranks;
    // Number of ranks that have not joined yet.
    int missing = 0;
    // Time at which the last rank joined, and that rank.
    double joined = -1;
    int last_rank = kNone;
  };

  RankTimes& times(int rank) { return timeline_.ranks[static_cast<std::size_t>(rank)]; }
  Rank& state(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }
  Collective& collective_of(int stage) { return collectives_[static_cast<std::size_t>(graph_.group_of(stage))]; }

  void add_collectives() {
    for (const auto& group : graph_.groups()) {
      Collective collective;
      for (const int stage : group) collective.ranks.push_back(schedule_.placement().rank_of(stage));
      std::sort(collective.ranks.begin(), collective.ranks.end());
      collective.ranks.erase(std::unique(collective.ranks.begin(), collective.ranks.end()), collective.ranks.end());
      collective.missing = static_cast<int>(collective.ranks.size());
      collectives_.push_back(std::move(collective));
    }
  }

  void advance(int rank) {
    Rank& self = state(rank);
    const auto actions = schedule_.actions(rank);
    while (self.next < actions.size() && execute(rank, self, actions[self.next])) ++self.next;
  }

  // Returns false if the action has to wait.
  bool execute(int rank, Rank& self, const Action& action) {
    if (action.is_overlap()) {
      if (!self.first_part_done) {
        if (!compute(rank, self, action.first(), self.pair_start)) return false;
        self.first_part_done = true;
      }
      double second_start = 0;
      if (!compute(rank, self, action.second(), second_start)) return false;
      self.first_part_done = false;
      times(rank).spans.push_back({self.pair_start, self.last_end});
    } else if (action.is_compute()) {
      double start = 0;
      if (!compute(rank, self, action, start)) return false;
      times(rank).spans.push_back({start, self.last_end});
    } else if (action.is_message()) {
      times(rank).spans.push_back(execute_message(rank, self, action));
    } else if (action.computation == Computation::SumShared) {
      if (!join_collective(rank, self, action)) return false;
    } else {
      const double start = self.clock;
      self.clock += sampler_.draw_duration(action);
      times(rank).spans.push_back({start, self.clock});
    }
    return true;
  }

  // Runs F, I, W or B and sets its start. Returns false if an input has not arrived.
  bool compute(int rank, Rank& self, const Action& part, double& start) {
    const std::size_t cell = schedule_.cell(part.stage, part.microbatch);
    const bool is_fwd = is_forward(part);
    start = self.clock;
    int waited_for = kNone;
    if (is_fwd || makes_input_gradient(part)) {
      const Direction direction = is_fwd ? Direction::Forward : Direction::Backward;
      const auto edges = is_fwd ? graph_.in_edges(part.stage) : graph_.out_edges(part.stage);
      for (const int edge : edges) {
        if (!network_.crosses_ranks(direction, edge) || network_.has_arrived(direction, edge, part.microbatch))
          continue;
        self.state = Rank::State::WaitingForInput;
        return false;
      }
      for (const int edge : edges) {
        if (!network_.crosses_ranks(direction, edge)) continue;
        const double received = std::max(start + network_.draw_receive(direction, edge),
                                         network_.arrival_time(direction, edge, part.microbatch));
        if (received > start) {
          start = received;
          const Edge& ends = graph_.edges()[static_cast<std::size_t>(edge)];
          waited_for = schedule_.placement().rank_of(is_fwd ? ends.from : ends.to);
        }
      }
    }
    account(rank, self, part, start, waited_for);
    if (is_fwd) {
      forward_end_[cell] = self.clock;
    } else if (makes_input_gradient(part)) {
      backward_end_[cell] = self.clock;
    }
    if (implicit_messages_) self.clock += send_results(part, self.clock);
    return true;
  }

  // Advances the clock over a computation, and updates the rank's work and stalls.
  void account(int rank, Rank& self, const Action& part, double start, int waited_for) {
    RankTimes& totals = times(rank);
    if (self.first_start == kNotYet) {
      self.first_start = start;
    } else if (waited_for != kNone) {
      totals.waiting[waited_for] += start - self.clock;
    }
    for (const auto& [other, time] : self.collective_stalls) totals.waiting[other] += time;
    self.collective_stalls.clear();
    const double time = sampler_.draw_duration(part);
    self.clock = start + time;
    self.last_end = self.done = self.clock;
    totals.work += time;
  }

  // Sends the results of a computation at `time`, and returns how long the rank is busy with that.
  double send_results(const Action& part, double time) {
    double busy = 0;
    const auto send_along = [&](Direction direction, int edge) {
      if (!network_.crosses_ranks(direction, edge)) return;
      network_.post(direction, edge, part.microbatch, 0);
      send(direction, edge, part.microbatch, time + busy);
      busy += network_.draw_send(direction, edge);
    };
    if (is_forward(part)) {
      for (const int edge : graph_.out_edges(part.stage)) send_along(Direction::Forward, edge);
    } else if (makes_input_gradient(part)) {
      for (const int edge : graph_.in_edges(part.stage)) send_along(Direction::Backward, edge);
    }
    return busy;
  }

  // Executes a SEND or RECV, and returns its span.
  Span execute_message(int rank, Rank& self, const Action& action) {
    const Edge ends = edge_under(action);
    const int edge = graph_.edge_index(ends.from, ends.to);
    const Direction direction = action.carries_activation() ? Direction::Forward : Direction::Backward;
    if (action.is_recv()) {
      const double start = self.clock;
      network_.post(direction, edge, action.microbatch, start);
      self.clock += network_.draw_post(direction, edge);
      return {start, self.clock};
    }
    const auto& ended = action.carries_activation() ? forward_end_ : backward_end_;
    const bool early = sends_first_part(rank, self, action);
    const double time = early ? ended[schedule_.cell(action.stage, action.microbatch)] : self.clock;
    send(direction, edge, action.microbatch, time);
    const double busy = network_.draw_send(direction, edge);
    self.clock += busy;
    return {time, time + busy};
  }

  // Returns true for a SEND that follows a pair, with only messages between them, and sends the result of the pair's
  // first part. Such a result leaves when that part ends.
  bool sends_first_part(int rank, const Rank& self, const Action& action) const {
    const auto actions = schedule_.actions(rank);
    for (std::size_t i = self.next; i-- > 0;) {
      if (actions[i].is_message()) continue;
      if (!actions[i].is_overlap()) return false;
      const Action first = actions[i].first();
      const bool makes_it =
          action.computation == Computation::SendForward ? is_forward(first) : makes_input_gradient(first);
      return makes_it && first.stage == action.stage && first.microbatch == action.microbatch;
    }
    return false;
  }

  void send(Direction direction, int edge, int microbatch, double time) {
    if (network_.send(direction, edge, microbatch, time)) wake(network_.receiver_rank(direction, edge));
  }

  // Returns false until all ranks of the group have joined.
  bool join_collective(int rank, Rank& self, const Action& action) {
    Collective& collective = collective_of(action.stage);
    if (self.state != Rank::State::InCollective) {
      self.state = Rank::State::InCollective;
      if (self.clock > collective.joined) {
        collective.joined = self.clock;
        collective.last_rank = rank;
      }
      --collective.missing;
    }
    if (collective.missing > 0) return false;
    self.state = Rank::State::Running;
    for (const int other : collective.ranks) wake(other);
    const double stall = collective.joined - self.clock;
    if (stall > 0) self.collective_stalls[collective.last_rank] += stall;
    times(rank).spans.push_back({self.clock, collective.joined});
    self.clock = self.done = collective.joined;
    return true;
  }

  // Queues a rank that waits, unless its collective is not complete.
  void wake(int rank) {
    Rank& other = state(rank);
    if (other.state == Rank::State::Running) return;
    if (other.state == Rank::State::InCollective) {
      if (collective_of(schedule_.actions(rank)[other.next].stage).missing > 0) return;
    } else {
      other.state = Rank::State::Running;
    }
    queue_.push_back(rank);
  }

  void finish() {
    for (int rank = 0; rank < schedule_.ranks(); ++rank) {
      const auto actions = schedule_.actions(rank);
      const std::size_t next = state(rank).next;
      if (next < actions.size()) {
        throw ScheduleError(concat("the schedule deadlocks: rank ", rank, " is blocked at ",
                                   place_text(schedule_, rank, next), ", ", to_string(actions[next]),
                                   ".\n  Hint: verify the schedule for the cycle of ranks that wait for each other."));
      }
      timeline_.makespan = std::max(timeline_.makespan, state(rank).done);
    }
    if (!std::isfinite(timeline_.makespan)) {
      throw ScheduleError("the costs are too large: the makespan overflows a double.");
    }
    double work = 0;
    for (int rank = 0; rank < schedule_.ranks(); ++rank) {
      RankTimes& totals = times(rank);
      work += totals.work;
      totals.fill = std::max(0.0, state(rank).first_start);
      totals.drain = timeline_.makespan - state(rank).last_end;
      totals.span = std::max(0.0, state(rank).done - totals.fill);
      timeline_.longest_span = std::max(timeline_.longest_span, totals.span);
    }
    if (timeline_.makespan > 0) timeline_.bubble = 1 - work / (schedule_.ranks() * timeline_.makespan);
  }

  const Schedule& schedule_;
  const StageGraph& graph_;
  // True for a schedule of computations only: results are sent at once, and their receives are always posted.
  const bool implicit_messages_;

  CostSampler sampler_;
  Network network_;
  // End of the forward, and of the input gradient, of each stage and microbatch.
  std::vector<double> forward_end_;
  std::vector<double> backward_end_;
  // Collectives by group.
  std::vector<Collective> collectives_;

  std::vector<Rank> ranks_;
  // Ranks that can run.
  std::vector<int> queue_;
  Timeline timeline_;
};

}  // namespace

void add_memory(const Schedule& schedule, const Costs& costs, Timeline& timeline) {
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    RankTimes& times = timeline.ranks[static_cast<std::size_t>(rank)];
    times.peak_activations = peak_activations(schedule, rank);
    if (!times.memory.empty()) continue;
    times.peak_bytes = peak_bytes(schedule, costs, rank);
    times.static_bytes = static_bytes(schedule, costs, rank);
  }
}

double duration(Computation computation, const StageCosts& stage) {
  switch (computation) {
    case Computation::Forward: return stage.forward;
    case Computation::InputBackward: return stage.input;
    case Computation::WeightBackward: return stage.weight;
    case Computation::FullBackward: return stage.input + stage.weight;
    case Computation::Recompute: return stage.recompute.value_or(stage.forward);
    case Computation::Unshard: return stage.unshard;
    case Computation::Reshard: return stage.reshard;
    case Computation::ReduceGrad: return stage.reduce;
    default: return 0;
  }
}

PairSpans split_pair(const Action& pair, const Span& span, const Costs& costs) {
  const double first = duration(pair.first_part, costs.of_stage(pair.stage));
  const double second = duration(pair.second_part, costs.of_stage(pair.other_stage));
  return {.first = {span.start, span.start + first}, .second = {span.end - second, span.end}};
}

Timeline simulate(const Schedule& schedule, const Costs& costs) {
  return simulate(schedule, costs, {}, /*seed=*/0);
}

Timeline simulate(const Schedule& schedule, const Costs& costs, const CostSamples& samples, std::uint64_t seed) {
  const Features features = features_of(schedule);
  if (const auto violation = verify_each_list(schedule, features)) {
    throw ScheduleError(explain(schedule, *violation));
  }
  Timeline timeline = Simulator(schedule, features, costs, samples, seed).run();
  add_memory(schedule, costs, timeline);
  return timeline;
}

}  // namespace penstock
