#include "penstock/program/split.h"

#include <algorithm>
#include <compare>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <tuple>
#include <utility>

#include "penstock/base/nearest.h"
#include "penstock/program/interpreter/program_state.h"
#include "penstock/program/partition/colocation.h"

namespace penstock {
namespace {

std::size_t index(int number) {
  return static_cast<std::size_t>(number);
}

// Whether a node computes something, and not only sizes and checks.
bool computes(const Graph& graph, const Node& node) {
  bool tensors = false;
  for_each_result(node, [&](int value) { tensors = tensors || graph.values[index(value)].kind == ValueKind::Tensor; });
  const auto* handle = std::get_if<c10::OperatorHandle>(&node.function);
  return handle != nullptr && (tensors || handle->schema().is_mutable());
}

// The nodes of each call of a module, those of the calls inside of it too: the first and the last.
struct Span {
  int first = -1;
  int last = -1;
};
std::vector<Span> spans_of(const Graph& graph) {
  std::vector<Span> spans(graph.calls.size());
  for (int number = 0; number < static_cast<int>(graph.nodes.size()); ++number) {
    for (int call = graph.nodes[index(number)].call; call >= 0; call = graph.calls[index(call)].parent) {
      Span& span = spans[index(call)];
      if (span.first < 0) span.first = number;
      span.last = number;
    }
  }
  return spans;
}

// From the nodes at which a stage begins.
std::vector<int> stages_from(const Graph& graph, const std::set<int>& beginnings) {
  std::vector<int> stages(graph.nodes.size(), 0);
  int stage = 0;
  // Nothing to compute yet, or no more: no stage of its own.
  bool has_work = false;
  int last_work = -1;
  for (int number = 0; number < static_cast<int>(graph.nodes.size()); ++number) {
    if (computes(graph, graph.nodes[index(number)])) last_work = number;
  }
  for (int number = 0; number < static_cast<int>(graph.nodes.size()); ++number) {
    if (beginnings.contains(number) && has_work && number <= last_work) {
      ++stage;
      has_work = false;
    }
    has_work = has_work || computes(graph, graph.nodes[index(number)]);
    stages[index(number)] = stage;
  }
  return stages;
}

[[noreturn]] void fail_unknown(const Program& program, const std::string& name) {
  std::set<std::string> known;
  for (const ModuleCall& call : program.graph().calls) {
    if (!call.path.empty()) known.insert(call.path);
  }
  const std::vector<std::string> names(known.begin(), known.end());
  std::string text = "there is no module '" + name + "' that computes something";
  const bool is_inside = std::any_of(names.begin(), names.end(), [&](const std::string& one) {
    return one.starts_with(std::string(name).append("."));
  });
  if (is_inside) {
    text += ": it has modules in it, and is not called itself.\n  Hint: name one of those, such as ";
    text += *std::find_if(names.begin(), names.end(),
                          [&](const std::string& one) { return one.starts_with(std::string(name).append(".")); });
  } else if (const auto near = nearest(name, names)) {
    text += ".\n  Hint: did you mean " + *near + "?";
    throw ProgramError(text);
  }
  throw ProgramError(text + ".");
}

// What it means to begin a stage with a node.
struct Border {
  // Tensors that cross, and how long it takes to send them, there and back.
  int tensors = 0;
  double seconds = 0;
  // Module calls that it cuts in two: 0 only in a program without modules, and 1, the whole model, between blocks.
  int calls = 0;
};

std::vector<Border> borders_of(const Program& program) {
  // A message, a tensor in it, and a byte.
  constexpr double kPerMessage = 2e-5;
  constexpr double kPerTensor = 1e-5;
  constexpr double kPerByte = 4e-10;
  const Graph& graph = program.graph();
  const std::size_t count = graph.nodes.size();
  std::vector<int> last_use(graph.values.size(), -1);
  for (int number = 0; number < static_cast<int>(count); ++number) {
    for_each_operand_value(graph.nodes[index(number)], [&](int value) { last_use[index(value)] = number; });
  }
  for (const ProgramOutput& output : program.outputs()) {
    for_each_value(output.operand, [&](int value) { last_use[index(value)] = static_cast<int>(count); });
  }
  // Differences between a border and the one before it.
  std::vector<Border> change(count + 1);
  const auto add = [&](int value, int from) {
    const auto& type = graph.values[index(value)].type;
    if (!type || last_use[index(value)] <= from) return;
    const double seconds = kPerTensor + kPerByte * static_cast<double>(type->bytes());
    change[index(from + 1)].seconds += seconds;
    ++change[index(from + 1)].tensors;
    if (last_use[index(value)] == static_cast<int>(count)) return;
    change[index(last_use[index(value)] + 1)].seconds -= seconds;
    --change[index(last_use[index(value)] + 1)].tensors;
  };
  for (int number = 0; number < static_cast<int>(count); ++number) {
    for_each_result(graph.nodes[index(number)], [&](int value) { add(value, number); });
  }
  for (const ProgramInput& input : program.inputs()) {
    if (input.kind == ProgramInput::Kind::User) add(input.value, -1);
  }
  for (const Span& span : spans_of(graph)) {
    if (span.first < 0) continue;
    ++change[index(span.first + 1)].calls;
    --change[index(span.last + 1)].calls;
  }
  std::vector<Border> borders(count);
  Border so_far{.seconds = kPerMessage};
  for (std::size_t i = 0; i < count; ++i) {
    so_far.tensors += change[i].tensors;
    so_far.seconds += change[i].seconds;
    so_far.calls += change[i].calls;
    borders[i] = so_far;
  }
  return borders;
}

// For each node, whether a stage may begin with it.
std::vector<bool> possible_beginnings(const Exported& exported) {
  const std::size_t count = exported.graph.nodes.size();
  std::vector<int> change(count + 1, 0);
  for (const Bond& bond : bonds_of(exported)) {
    // Something in the first stage is there from the beginning.
    const auto [first, last] = std::minmax({std::max(bond.writer, 0), std::max(bond.user, 0)});
    ++change[index(first + 1)];
    --change[index(last + 1)];
  }
  std::vector<bool> possible(count, true);
  int bonds = 0;
  for (std::size_t i = 0; i < count; ++i) possible[i] = (bonds += change[i]) == 0;
  return possible;
}

// A cut by nodes' costs, in two passes over all cuts: the least that the slowest stage can take, and then, among the cuts
// that come close to it, the one with the best borders. Of a program with many nodes not all cuts are looked at, as their
// number grows with the square: of each run of nodes that takes a small part of a stage, only the best border counts.
class EvenSplit {
 public:
  EvenSplit(const Program& program, int stages, std::span<const NodeCost> costs)
      : stages_(stages),
        count_(static_cast<int>(program.graph().nodes.size())),
        possible_(possible_beginnings(*program.state()->exported)),
        borders_(borders_of(program)),
        before_(index(count_) + 1, 0),
        work_before_(index(count_) + 1, 0) {
    for (int i = 0; i < count_; ++i) {
      before_[index(i + 1)] = before_[index(i)] + costs[index(i)].seconds;
      work_before_[index(i + 1)] =
          work_before_[index(i)] + (computes(program.graph(), program.graph().nodes[index(i)]) ? 1 : 0);
    }
    borders_to_try_ = few_borders();
  }

  // Returns the nodes at which stages begin. Throws ProgramError if there cannot be so many.
  std::set<int> beginnings() {
    // Costs are estimates, or medians of runs that spread by more than this; and a tensor that crosses costs time that no
    // estimate knows (memory that lives longer, a gradient that comes back and is added).
    constexpr double kTolerance = 0.1;
    if (count_ == 0) return {};
    double least = least_time();
    if (least == kNever && static_cast<int>(borders_to_try_.size()) <= count_) {
      borders_to_try_ = all_borders();
      least = least_time();
    }
    if (least == kNever) fail();
    return best_borders((1 + kTolerance) * least);
  }

 private:
  static constexpr double kNever = std::numeric_limits<double>::infinity();

  // What a stage takes that has these nodes, with what it receives and sends.
  double seconds_of(int begin, int end) const {
    return before_[index(end)] - before_[index(begin)] + sending(begin) + sending(end);
  }
  double sending(int border) const { return border <= 0 || border >= count_ ? 0 : borders_[index(border)].seconds; }
  bool can_be_stage(int begin, int end) const {
    return possible_[index(begin)] && work_before_[index(end)] > work_before_[index(begin)];
  }

  std::vector<int> all_borders() const {
    std::vector<int> all(index(count_) + 1);
    std::iota(all.begin(), all.end(), 0);
    return all;
  }

  // Both ends, and of each run of nodes the border that the fewest tensors cross.
  std::vector<int> few_borders() const {
    constexpr int kMostNodes = 2000;
    constexpr double kRunsOfAStage = 200;
    if (count_ <= kMostNodes) return all_borders();
    // Of what a stage has at the least; by time, and by number for nodes that take none.
    const auto place = [&](int node) {
      const double whole = before_[index(count_)];
      return (whole > 0 ? before_[index(node)] / whole : 0) + static_cast<double>(node) / count_;
    };
    const double run = 1 / (kRunsOfAStage * stages_);
    const auto is_better = [&](int one, int other) {
      const Border& left = borders_[index(one)];
      const Border& right = borders_[index(other)];
      return std::tie(left.tensors, left.calls, left.seconds) < std::tie(right.tensors, right.calls, right.seconds);
    };
    std::vector<int> few{0};
    int best = -1;
    double begin = 0;
    for (int node = 1; node < count_; ++node) {
      if (best >= 0 && place(node) - begin > run) {
        few.push_back(std::exchange(best, -1));
        begin = place(node);
      }
      if (possible_[index(node)] && (best < 0 || is_better(node, best))) best = node;
    }
    if (best >= 0) few.push_back(best);
    few.push_back(count_);
    return few;
  }

  // By number of stages and index of the border behind them: the least that the slowest of them takes.
  std::vector<std::vector<double>> least_times() const {
    const std::size_t borders = borders_to_try_.size();
    std::vector<std::vector<double>> best(index(stages_) + 1, std::vector<double>(borders, kNever));
    best[0][0] = 0;
    for (int k = 1; k <= stages_; ++k) {
      for (std::size_t j = 1; j < borders; ++j) {
        const int end = borders_to_try_[j];
        double& slowest = best[index(k)][j];
        // The stage grows from here on, and so does what it takes.
        for (std::size_t i = j; i-- > 0;) {
          const int begin = borders_to_try_[i];
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
    throw ProgramError("the program cannot be cut into " + std::to_string(stages_) +
                       " stages: what is written to in place keeps nodes together, and " + std::to_string(most) +
                       (most == 1 ? " stage is" : " stages are") + " the most.");
  }

  // Of all borders together, and of the slowest stage; the first that differs decides.
  struct Price {
    int tensors = 0;
    int calls = 0;
    double sending = 0;
    double slowest = 0;
    auto operator<=>(const Price&) const = default;
  };

  std::set<int> best_borders(double most_seconds) const {
    constexpr Price kUnknown{.tensors = std::numeric_limits<int>::max()};
    const std::size_t borders = borders_to_try_.size();
    // By number of stages and index of the border behind them: the best of all cuts, and where its last stage begins.
    std::vector<std::vector<Price>> best(index(stages_) + 1, std::vector<Price>(borders, kUnknown));
    std::vector<std::vector<std::size_t>> from(index(stages_) + 1, std::vector<std::size_t>(borders, 0));
    best[0][0] = {};
    for (int k = 1; k <= stages_; ++k) {
      for (std::size_t j = 1; j < borders; ++j) {
        const int end = borders_to_try_[j];
        Price& price = best[index(k)][j];
        for (std::size_t i = j; i-- > 0;) {
          const int begin = borders_to_try_[i];
          if (before_[index(end)] - before_[index(begin)] > most_seconds) break;
          const Price& so_far = best[index(k - 1)][i];
          const double seconds = seconds_of(begin, end);
          if (so_far == kUnknown || seconds > most_seconds || !can_be_stage(begin, end)) continue;
          const Border border = begin == 0 ? Border() : borders_[index(begin)];
          const Price candidate{.tensors = so_far.tensors + border.tensors,
                                .calls = so_far.calls + border.calls,
                                .sending = so_far.sending + border.seconds,
                                .slowest = std::max(so_far.slowest, seconds)};
          if (!(candidate < price)) continue;
          price = candidate;
          from[index(k)][j] = i;
        }
      }
    }
    std::set<int> beginnings;
    std::size_t end = borders - 1;
    for (int k = stages_; k > 1; --k) {
      end = from[index(k)][end];
      beginnings.insert(borders_to_try_[end]);
    }
    return beginnings;
  }

  int stages_;
  int count_;
  // By node: whether a stage may begin with it, and what that means.
  std::vector<bool> possible_;
  std::vector<Border> borders_;
  // By node, and behind the last: seconds and nodes that compute something, of all before it.
  std::vector<double> before_;
  std::vector<int> work_before_;
  // The first nodes of stages that are tried, from 0 to the number of nodes.
  std::vector<int> borders_to_try_;
};

}  // namespace

std::vector<int> split_at(const Program& program, const SplitSpec& spec) {
  const Graph& graph = program.graph();
  const std::vector<Span> spans = spans_of(graph);
  std::set<int> beginnings(graph.marks.begin(), graph.marks.end());
  for (const auto& [name, point] : spec) {
    bool found = false;
    for (std::size_t call = 0; call < graph.calls.size(); ++call) {
      if (graph.calls[call].path != name || spans[call].first < 0) continue;
      found = true;
      beginnings.insert(point == SplitPoint::BEGINNING ? spans[call].first : spans[call].last + 1);
    }
    if (!found || name.empty()) fail_unknown(program, name);
  }
  return stages_from(graph, beginnings);
}

std::vector<int> split_evenly(const Program& program, int stages, std::span<const NodeCost> costs) {
  const Graph& graph = program.graph();
  int work = 0;
  for (const Node& node : graph.nodes) work += computes(graph, node) ? 1 : 0;
  if (stages < 1 || stages > std::max(work, 1)) {
    throw ProgramError("the program cannot be cut into " + std::to_string(stages) + " stages: it has " +
                       std::to_string(work) + " operations on tensors, and a stage at least one.");
  }
  return stages_from(graph, EvenSplit(program, stages, costs).beginnings());
}

std::vector<int> split_by(const Program& program, const std::function<int(const Node& node)>& stage_of) {
  const Graph& graph = program.graph();
  std::vector<int> stages;
  std::set<int> used;
  for (const Node& node : graph.nodes) {
    stages.push_back(stage_of(node));
    if (stages.back() < 0) {
      throw ProgramError(describe(graph, node) + " was put into stage " + std::to_string(stages.back()) +
                         "; stages count from 0.");
    }
    used.insert(stages.back());
  }
  // Numbers that no node has are left out.
  std::map<int, int> number;
  for (const int stage : used) number.emplace(stage, static_cast<int>(number.size()));
  for (int& stage : stages) stage = number.at(stage);
  return stages;
}

}  // namespace penstock
