// The Wiring says which outputs of which stages are the arguments of a stage. Without a word, a stage takes all outputs
// of the one before. A value that several stages take goes from one to the next: the first of them hands it on as one
// more output, and so on; so its gradients add up in the order in which one process would add them.
//
//   Wiring wiring(4);                        // a chain
//   wiring.connect(1, {{0, 0}});             // stage 1 takes the first output of stage 0,
//   wiring.connect(3, {{2, 0}, {0, 1}});     // and stage 3 the second one, behind what stage 2 gives: a skip
#pragma once

#include <cstddef>
#include <optional>
#include <stdexcept>
#include <vector>

namespace penstock {

// Stages that cannot be connected, or that give or take something else than they should. The message names the stage.
class StageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// An output of a stage.
struct StageOutput {
  int stage = 0;
  int output = 0;
  friend auto operator<=>(const StageOutput&, const StageOutput&) = default;
};

class Wiring {
 public:
  // A chain of stages.
  explicit Wiring(int stages);

  // The arguments of a stage, in order. Throws StageError unless each is an output of an earlier stage, and named once.
  void connect(int stage, std::vector<StageOutput> arguments);

  // What goes from one stage to another.
  struct Link {
    int from = 0;
    int to = 0;
    // In this order; left out: all outputs of `from`.
    std::optional<std::vector<StageOutput>> values;
  };

  int stages() const { return static_cast<int>(arguments_.size()); }
  // Left out: all outputs of the stage before.
  const std::optional<std::vector<StageOutput>>& arguments(int stage) const {
    return arguments_[static_cast<std::size_t>(stage)];
  }
  // All links, the chain's too where nothing goes along it, ordered by `to` and then by `from`.
  const std::vector<Link>& links() const { return links_; }
  // Those that lead to a stage, and those that lead away from it, in ascending order of the other end.
  std::vector<Link> links_to(int stage) const;
  std::vector<Link> links_from(int stage) const;

  // Returns true if all stages of both take the same arguments; links follow from these.
  friend bool operator==(const Wiring& a, const Wiring& b) { return a.arguments_ == b.arguments_; }

 private:
  void find_links();

  std::vector<std::optional<std::vector<StageOutput>>> arguments_;
  std::vector<Link> links_;
};

}  // namespace penstock
