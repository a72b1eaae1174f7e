#include "penstock/program/partition/even_split.h"

#include <algorithm>
#include <compare>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>
#include <vector>

#include "penstock/base/index.h"
#include "penstock/base/text.h"
#include "penstock/program/error.h"
#include "penstock/program/partition/boundary.h"

namespace penstock::internal {
namespace {

// Two passes of dynamic programming over (stages, boundary): the first finds the least time of the slowest stage, the
// second the best boundaries among the splits that come close to it. Both are quadratic in the number of boundaries, so
// for a large program only the best boundary of each short run of nodes is a candidate.
class EvenSplit {
 public:
  EvenSplit(const ExportedProgram& exported, int stages, std::span<const NodeCost> costs)
      : stages_(stages),
        count_(static_cast<int>(exported.graph.nodes.size())),
        possible_(possible_boundaries(exported)),
        boundaries_(boundaries_of(exported)),
        before_(index(count_) + 1, 0),
        work_before_(index(count_) + 1, 0) {
    for (int i = 0; i < count_; ++i) {
      before_[index(i + 1)] = before_[index(i)] + costs[index(i)].seconds;
      work_before_[index(i + 1)] =
          work_before_[index(i)] + (computes(exported.graph, exported.graph.nodes[index(i)]) ? 1 : 0);
    }
    candidates_ = reduced_candidates();
  }

  std::set<int> run() {
    // Costs are estimates, or medians of runs that vary by more than this. A boundary value also costs time that no
    // estimate contains: its memory lives longer, and its gradient is received and added.
    constexpr double kTolerance = 0.1;
    if (count_ == 0) return {};
    double least = least_time();
    if (least == kNever && static_cast<int>(candidates_.size()) <= count_) {
      candidates_ = all_nodes();
      least = least_time();
    }
    if (least == kNever) fail();
    return best_boundaries((1 + kTolerance) * least);
  }

 private:
  static constexpr double kNever = std::numeric_limits<double>::infinity();

  // Returns the seconds of a stage with these nodes, including what it receives and sends.
  double seconds_of(int begin, int end) const {
    return before_[index(end)] - before_[index(begin)] + sending(begin) + sending(end);
  }
  double sending(int node) const { return node <= 0 || node >= count_ ? 0 : boundaries_[index(node)].seconds; }
  bool can_be_stage(int begin, int end) const {
    return possible_[index(begin)] && work_before_[index(end)] > work_before_[index(begin)];
  }

  std::vector<int> all_nodes() const {
    std::vector<int> all(index(count_) + 1);
    std::iota(all.begin(), all.end(), 0);
    return all;
  }

  // Returns both ends, and of each run of nodes the boundary with the fewest tensors.
  std::vector<int> reduced_candidates() const {
    constexpr int kMostNodes = 2000;
    constexpr double kRunsPerStage = 200;
    if (count_ <= kMostNodes) return all_nodes();
    // Position of a node in the program, by time and, for nodes that take none, by index.
    const auto position = [&](int node) {
      const double total = before_[index(count_)];
      return (total > 0 ? before_[index(node)] / total : 0) + static_cast<double>(node) / count_;
    };
    const double run_length = 1 / (kRunsPerStage * stages_);
    const auto is_better = [&](int node, int other) {
      const Boundary& left = boundaries_[index(node)];
      const Boundary& right = boundaries_[index(other)];
      return std::tie(left.tensors, left.calls, left.seconds) < std::tie(right.tensors, right.calls, right.seconds);
    };
    std::vector<int> candidates{0};
    int best = -1;
    double begin = 0;
    for (int node = 1; node < count_; ++node) {
      if (best >= 0 && position(node) - begin > run_length) {
        candidates.push_back(std::exchange(best, -1));
        begin = position(node);
      }
      if (possible_[index(node)] && (best < 0 || is_better(node, best))) best = node;
    }
    if (best >= 0) candidates.push_back(best);
    candidates.push_back(count_);
    return candidates;
  }

  // Returns the least time of the slowest stage, by number of stages and index of the candidate that ends the last of
  // them.
  std::vector<std::vector<double>> least_times() const {
    const std::size_t count = candidates_.size();
    std::vector<std::vector<double>> best(index(stages_) + 1, std::vector<double>(count, kNever));
    best[0][0] = 0;
    for (int k = 1; k <= stages_; ++k) {
      for (std::size_t j = 1; j < count; ++j) {
        const int end = candidates_[j];
        double& slowest = best[index(k)][j];
        // The stage grows with each iteration, and so does its time.
        for (std::size_t i = j; i-- > 0;) {
          const int begin = candidates_[i];
          if (before_[index(end)] - before_[index(begin)] > slowest) break;
          if (!can_be_stage(begin, end)) continue;
          slowest = std::min(slowest, std::max(best[index(k - 1)][i], seconds_of(begin, end)));
        }
      }
    }
    return best;
  }
  double least_time() const { return least_times()[index(stages_)].back(); }

  [[noreturn]] void fail() const {
    const std::vector<std::vector<double>> best = least_times();
    int most = stages_;
    while (best[index(most)].back() == kNever) --most;
    throw ProgramError(concat("the program cannot be split into ", stages_,
                              " stages: mutations in place keep nodes together, and ", most,
                              most == 1 ? " stage is" : " stages are", " the most."));
  }

  // Sums over all boundaries, and the time of the slowest stage. Compared lexicographically.
  struct Price {
    int tensors = 0;
    int calls = 0;
    double sending = 0;
    double slowest = 0;
    auto operator<=>(const Price&) const = default;
  };

  std::set<int> best_boundaries(double most_seconds) const {
    constexpr Price kUnknown{.tensors = std::numeric_limits<int>::max()};
    const std::size_t count = candidates_.size();
    // Indexed by number of stages and by the candidate that ends the last of them: the best price, and the start of its
    // last stage.
    std::vector<std::vector<Price>> best(index(stages_) + 1, std::vector<Price>(count, kUnknown));
    std::vector<std::vector<std::size_t>> from(index(stages_) + 1, std::vector<std::size_t>(count, 0));
    best[0][0] = {};
    for (int k = 1; k <= stages_; ++k) {
      for (std::size_t j = 1; j < count; ++j) {
        const int end = candidates_[j];
        Price& price = best[index(k)][j];
        for (std::size_t i = j; i-- > 0;) {
          const int begin = candidates_[i];
          if (before_[index(end)] - before_[index(begin)] > most_seconds) break;
          const Price& so_far = best[index(k - 1)][i];
          const double seconds = seconds_of(begin, end);
          if (so_far == kUnknown || seconds > most_seconds || !can_be_stage(begin, end)) continue;
          const Boundary boundary = begin == 0 ? Boundary() : boundaries_[index(begin)];
          const Price candidate{.tensors = so_far.tensors + boundary.tensors,
                                .calls = so_far.calls + boundary.calls,
                                .sending = so_far.sending + boundary.seconds,
                                .slowest = std::max(so_far.slowest, seconds)};
          if (!(candidate < price)) continue;
          price = candidate;
          from[index(k)][j] = i;
        }
      }
    }
    std::set<int> starts;
    std::size_t end = count - 1;
    for (int k = stages_; k > 1; --k) {
      end = from[index(k)][end];
      starts.insert(candidates_[end]);
    }
    return starts;
  }

  int stages_;
  int count_;
  // Indexed by node: true if a stage may start with it, and the boundary before it.
  std::vector<bool> possible_;
  std::vector<Boundary> boundaries_;
  // Prefix sums over the nodes: seconds, and the number of nodes that compute tensors.
  std::vector<double> before_;
  std::vector<int> work_before_;
  // Nodes at which a stage may start, from 0, and the number of nodes as the end.
  std::vector<int> candidates_;
};

}  // namespace

std::set<int> even_split(const ExportedProgram& exported, int stages, std::span<const NodeCost> costs) {
  return EvenSplit(exported, stages, costs).run();
}

}  // namespace penstock::internal
