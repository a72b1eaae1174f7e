// Ranks are run one after the other, each as far as what it needs is known; what it is stuck on wakes it again. Times do
// not depend on the order in which ranks are run, except for the choice of samples.
#include "penstock/schedule/simulate.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <utility>

#include "penstock/schedule/error.h"
#include "penstock/schedule/source.h"
#include "penstock/schedule/verify.h"

namespace penstock {
namespace {

enum class Way : std::uint8_t { Forward, Backward };

// Deals out samples at random, each once before any of them comes again.
class Deck {
 public:
  Deck() = default;
  explicit Deck(std::vector<double> samples) : samples_(std::move(samples)), left_(samples_.size()) {}

  double draw(std::mt19937_64& random, double otherwise) {
    if (samples_.empty()) return otherwise;
    if (left_ == 0) left_ = samples_.size();
    std::swap(samples_[random() % left_], samples_[left_ - 1]);
    return samples_[--left_];
  }

 private:
  std::vector<double> samples_;
  // The first of them have not been dealt out since all were.
  std::size_t left_ = 0;
};

class Simulator {
 public:
  Simulator(const Schedule& schedule, const Features& features, const Costs& costs, const CostSamples& samples,
            std::uint64_t seed)
      : schedule_(schedule),
        graph_(schedule.graph()),
        implicit_messages_(!features.communication),
        has_backward_(features.backward),
        random_(seed) {
    for (int stage = 0; stage < schedule.stages(); ++stage) stage_costs_.push_back(costs.of_stage(stage));
    for (const auto& by_computation : samples.stages) {
      auto& decks = stage_decks_.emplace_back();
      for (const auto& [computation, measured] : by_computation) decks.emplace(computation, Deck(measured));
    }
    for (const auto& [ends, link] : samples.links) {
      link_decks_.emplace(ends, LinkDecks{.latency = Deck(link.latency),
                                          .send = Deck(link.send),
                                          .post = Deck(link.post),
                                          .receive = Deck(link.receive)});
    }
    for (const Way way : {Way::Forward, Way::Backward}) add_links(way, costs);
    forward_end_.assign(schedule.cells(), kNotYet);
    backward_end_.assign(schedule.cells(), kNotYet);
    for (const Group& group : make_groups()) groups_.push_back(group);
    ranks_.resize(static_cast<std::size_t>(schedule.ranks()));
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

  struct Message {
    // When it left, and when its receive was posted, as far as known; when it arrived, once both are.
    double time = 0;
    enum class State : std::uint8_t { Unknown, Sent, Posted, Arrived } state = State::Unknown;
  };

  struct LinkDecks {
    Deck latency;
    Deck send;
    Deck post;
    Deck receive;
  };

  // An edge in one direction, with the link under it.
  struct Channel {
    int receiver_rank = 0;
    // Index into link_free_, which edges between the same ranks share.
    std::size_t link = 0;
    LinkCosts costs;
    // Null without samples.
    LinkDecks* decks = nullptr;
    double occupation = 0;
    bool crosses = false;
  };

  struct Rank {
    std::size_t next = 0;
    double clock = 0;
    double first_start = kNotYet;
    double last_end = 0;
    // When the last computation or meeting ended; messages after it are not waited for.
    double done = 0;
    enum class State : std::uint8_t { Running, WaitsForInput, InMeeting } state = State::Running;
    // In the middle of a pair: the first part has run.
    bool first_part_done = false;
    double pair_start = 0;
    // Time spent in meetings since the last computation, by the rank that came last.
    std::map<int, double> met = {};
    int activations = 0;
    double bytes = 0;
  };

  struct Group {
    int missing = 0;
    // When the last rank came, and which.
    double met = -1;
    int last = kNone;
    std::vector<int> ranks;
  };

  RankTimes& times(int rank) { return timeline_.ranks[static_cast<std::size_t>(rank)]; }
  Rank& state(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }
  Channel& channel(Way way, int edge) {
    return channels_[static_cast<std::size_t>(way)][static_cast<std::size_t>(edge)];
  }
  Message& message_of(Way way, int edge, int microbatch) {
    return messages_[static_cast<std::size_t>(way)]
                    [static_cast<std::size_t>(edge) * static_cast<std::size_t>(schedule_.microbatches()) +
                     static_cast<std::size_t>(microbatch)];
  }

  void add_links(Way way, const Costs& costs) {
    auto& channels = channels_[static_cast<std::size_t>(way)];
    for (const Edge& edge : graph_.edges()) {
      const int from = schedule_.placement().rank_of(way == Way::Forward ? edge.from : edge.to);
      const int to = schedule_.placement().rank_of(way == Way::Forward ? edge.to : edge.from);
      const LinkCosts& link = costs.of_link(from, to);
      const double bytes = costs.of_stage(edge.from).bytes_sent;
      channels.push_back({.receiver_rank = to,
                          .link = link_index_.try_emplace({from, to}, link_index_.size()).first->second,
                          .costs = link,
                          .decks = link_decks_.contains({from, to}) ? &link_decks_.at({from, to}) : nullptr,
                          .occupation = link.bandwidth > 0 ? bytes / link.bandwidth : 0,
                          .crosses = from != to});
    }
    link_free_.resize(link_index_.size(), 0);
    messages_[static_cast<std::size_t>(way)].resize(graph_.edges().size() *
                                                    static_cast<std::size_t>(schedule_.microbatches()));
  }

  std::vector<Group> make_groups() const {
    std::vector<Group> groups;
    for (const auto& members : graph_.groups()) {
      Group group;
      for (const int stage : members) group.ranks.push_back(schedule_.placement().rank_of(stage));
      std::sort(group.ranks.begin(), group.ranks.end());
      group.ranks.erase(std::unique(group.ranks.begin(), group.ranks.end()), group.ranks.end());
      group.missing = static_cast<int>(group.ranks.size());
      groups.push_back(std::move(group));
    }
    return groups;
  }

  void advance(int rank) {
    Rank& self = state(rank);
    const auto actions = schedule_.actions(rank);
    while (self.next < actions.size() && take(rank, self, actions[self.next])) ++self.next;
  }

  // Whether the action could run.
  bool take(int rank, Rank& self, const Action& action) {
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
      times(rank).spans.push_back(pass_message(rank, self, action));
    } else if (action.computation == Computation::SumShared) {
      if (!meet(rank, self, action)) return false;
    } else {
      const double start = self.clock;
      self.clock += draw_duration(action);
      times(rank).spans.push_back({start, self.clock});
    }
    return true;
  }

  bool compute(int rank, Rank& self, const Action& part, double& start) {
    const std::size_t cell = schedule_.cell(part.stage, part.microbatch);
    const bool forwards = is_forward(part);
    start = self.clock;
    int waited_for = kNone;
    if (forwards || makes_input_gradient(part)) {
      const Way way = forwards ? Way::Forward : Way::Backward;
      const auto& edges = forwards ? graph_.in_edges(part.stage) : graph_.out_edges(part.stage);
      for (const int e : edges) {
        if (!channel(way, e).crosses || message_of(way, e, part.microbatch).state == Message::State::Arrived) continue;
        self.state = Rank::State::WaitsForInput;
        return false;
      }
      for (const int e : edges) {
        if (!channel(way, e).crosses) continue;
        const Message& input = message_of(way, e, part.microbatch);
        const double taken =
            std::max(start + draw(channel(way, e), &LinkDecks::receive, &LinkCosts::receive), input.time);
        if (taken > start) {
          start = taken;
          const Edge& edge = graph_.edges()[static_cast<std::size_t>(e)];
          waited_for = schedule_.placement().rank_of(forwards ? edge.from : edge.to);
        }
      }
    }
    account(rank, self, part, start, waited_for);
    if (forwards) {
      forward_end_[cell] = self.clock;
    } else if (makes_input_gradient(part)) {
      backward_end_[cell] = self.clock;
    }
    if (implicit_messages_) self.clock += send_results(part, self.clock);
    return true;
  }

  void account(int rank, Rank& self, const Action& part, double start, int waited_for) {
    const StageCosts& costs = stage_costs_[static_cast<std::size_t>(part.stage)];
    RankTimes& figures = times(rank);
    if (self.first_start == kNotYet) {
      self.first_start = start;
    } else if (waited_for != kNone) {
      figures.waiting[waited_for] += start - self.clock;
    }
    for (const auto& [other, time] : self.met) figures.waiting[other] += time;
    self.met.clear();
    const double takes = draw_duration(part);
    self.clock = start + takes;
    self.last_end = self.done = self.clock;
    figures.work += takes;
    if (is_forward(part)) {
      figures.peak_activations = std::max(figures.peak_activations, ++self.activations);
      figures.peak_bytes = std::max(figures.peak_bytes, self.bytes += costs.bytes_kept);
    }
    // Without backwards nothing is kept for them.
    if (makes_weight_gradient(part) || !has_backward_) {
      --self.activations;
      self.bytes -= costs.bytes_kept;
    }
  }

  double draw_duration(const Action& part) {
    const auto stage = static_cast<std::size_t>(part.stage);
    const double otherwise = duration(part.computation, stage_costs_[stage]);
    if (stage >= stage_decks_.size()) return otherwise;
    const auto deck = stage_decks_[stage].find(part.computation);
    return deck == stage_decks_[stage].end() ? otherwise : deck->second.draw(random_, otherwise);
  }
  double draw(const Channel& over, Deck LinkDecks::* deck, double LinkCosts::* cost) {
    return over.decks == nullptr ? over.costs.*cost : (over.decks->*deck).draw(random_, over.costs.*cost);
  }

  // Sends what a part has made, and returns the rank's time for that.
  double send_results(const Action& part, double time) {
    double takes = 0;
    const auto pass = [&](Way way, int e) {
      if (!channel(way, e).crosses) return;
      post(way, e, part.microbatch, 0);
      send(way, e, part.microbatch, time + takes);
      takes += draw(channel(way, e), &LinkDecks::send, &LinkCosts::send);
    };
    if (is_forward(part)) {
      for (const int e : graph_.out_edges(part.stage)) pass(Way::Forward, e);
    } else if (makes_input_gradient(part)) {
      for (const int e : graph_.in_edges(part.stage)) pass(Way::Backward, e);
    }
    return takes;
  }

  // Posts or sends a message, and returns when.
  Span pass_message(int rank, Rank& self, const Action& action) {
    const Edge along = edge_under(action);
    const int e = graph_.edge_index(along.from, along.to);
    const bool forwards = action.carries_activation();
    const Way way = forwards ? Way::Forward : Way::Backward;
    if (action.is_recv()) {
      const double start = self.clock;
      post(way, e, action.microbatch, start);
      self.clock += draw(channel(way, e), &LinkDecks::post, &LinkCosts::post);
      return {start, self.clock};
    }
    const double made = (forwards ? forward_end_ : backward_end_)[schedule_.cell(action.stage, action.microbatch)];
    const double time = leaves_pair_early(rank, self, action) ? made : self.clock;
    send(way, e, action.microbatch, time);
    const double takes = draw(channel(way, e), &LinkDecks::send, &LinkCosts::send);
    self.clock += takes;
    return {time, time + takes};
  }

  // Whether the send stands behind a pair, with messages at most in between, and sends what its first part made.
  bool leaves_pair_early(int rank, const Rank& self, const Action& action) const {
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

  void send(Way way, int e, int microbatch, double time) {
    const Channel& under = channel(way, e);
    double& free = link_free_[under.link];
    const double leaves = std::max(time, free);
    free = leaves + under.occupation;
    Message& sent = message_of(way, e, microbatch);
    if (sent.state == Message::State::Posted) {
      sent = {std::max(leaves, sent.time) + in_transit(under), Message::State::Arrived};
      wake(under.receiver_rank);
    } else {
      sent = {leaves, Message::State::Sent};
    }
  }

  void post(Way way, int e, int microbatch, double time) {
    const Channel& under = channel(way, e);
    Message& posted = message_of(way, e, microbatch);
    if (posted.state == Message::State::Sent) {
      posted = {std::max(posted.time, time) + in_transit(under), Message::State::Arrived};
    } else if (posted.state == Message::State::Unknown) {
      posted = {time, Message::State::Posted};
    }
  }

  double in_transit(const Channel& over) {
    return over.occupation + draw(over, &LinkDecks::latency, &LinkCosts::latency);
  }

  bool meet(int rank, Rank& self, const Action& action) {
    Group& group = groups_[static_cast<std::size_t>(graph_.group_of(action.stage))];
    if (self.state != Rank::State::InMeeting) {
      self.state = Rank::State::InMeeting;
      if (self.clock > group.met) {
        group.met = self.clock;
        group.last = rank;
      }
      --group.missing;
    }
    if (group.missing > 0) return false;
    self.state = Rank::State::Running;
    for (const int other : group.ranks) wake(other);
    if (group.met > self.clock) self.met[group.last] += group.met - self.clock;
    times(rank).spans.push_back({self.clock, group.met});
    self.clock = self.done = group.met;
    return true;
  }

  void wake(int rank) {
    Rank& other = state(rank);
    if (other.state == Rank::State::Running) return;
    if (other.state == Rank::State::InMeeting) {
      const Action& meeting = schedule_.actions(rank)[other.next];
      if (groups_[static_cast<std::size_t>(graph_.group_of(meeting.stage))].missing > 0) return;
    } else {
      other.state = Rank::State::Running;
    }
    queue_.push_back(rank);
  }

  void finish() {
    for (int rank = 0; rank < schedule_.ranks(); ++rank) {
      const auto actions = schedule_.actions(rank);
      if (state(rank).next < actions.size()) {
        throw ScheduleError("the schedule does not run to its end: rank " + std::to_string(rank) + " is stuck at " +
                            place_text(schedule_, rank, state(rank).next) + ", " +
                            to_string(actions[state(rank).next]) + ".\n  Hint: verify says why.");
      }
      timeline_.makespan = std::max(timeline_.makespan, state(rank).done);
    }
    if (!std::isfinite(timeline_.makespan)) {
      throw ScheduleError("the costs are too large: the makespan is beyond what a number can hold.");
    }
    double work = 0;
    for (int rank = 0; rank < schedule_.ranks(); ++rank) {
      RankTimes& figures = times(rank);
      work += figures.work;
      figures.fill = std::max(0.0, state(rank).first_start);
      figures.drain = timeline_.makespan - state(rank).last_end;
    }
    if (timeline_.makespan > 0) timeline_.bubble = 1 - work / (schedule_.ranks() * timeline_.makespan);
  }

  const Schedule& schedule_;
  const StageGraph& graph_;
  // A schedule of computations only: results are sent at once, to where a receive is always posted.
  const bool implicit_messages_;
  const bool has_backward_;

  std::vector<StageCosts> stage_costs_;
  // By stage and computation, and by ranks; empty without samples.
  std::vector<std::map<Computation, Deck>> stage_decks_;
  std::map<std::pair<int, int>, LinkDecks> link_decks_;
  std::mt19937_64 random_;
  std::map<std::pair<int, int>, std::size_t> link_index_;
  std::vector<double> link_free_;
  // By way and edge; by way, edge and microbatch.
  std::vector<Channel> channels_[2];
  std::vector<Message> messages_[2];
  // By stage and microbatch.
  std::vector<double> forward_end_;
  std::vector<double> backward_end_;
  std::vector<Group> groups_;

  std::vector<Rank> ranks_;
  std::vector<int> queue_;
  Timeline timeline_;
};

}  // namespace

double duration(Computation computation, const StageCosts& stage) {
  switch (computation) {
    case Computation::Forward: return stage.forward;
    case Computation::InputBackward: return stage.input;
    case Computation::WeightBackward: return stage.weight;
    case Computation::FullBackward: return stage.input + stage.weight;
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
  if (const auto violation = verify_each_list(schedule, features)) throw ScheduleError(explain(schedule, *violation));
  return Simulator(schedule, features, costs, samples, seed).run();
}

}  // namespace penstock
