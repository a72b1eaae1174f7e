// A Wiring maps outputs of stages to arguments of later stages. By default a stage takes all outputs of the previous
// one. A value that several stages take travels from one consumer to the next: the first of them forwards it through as
// one more output, and so on, so that its gradients are summed in the order in which one process would sum them.
//
//   Wiring wiring(4);                        // a chain
//   wiring.connect(1, {{0, 0}});             // stage 1 takes the first output of stage 0
//   wiring.connect(3, {{2, 0}, {0, 1}});     // stage 3 takes the second one too: a skip connection
#pragma once

#include <cstddef>
#include <optional>
#include <stdexcept>
#include <vector>

namespace penstock {

// Thrown for stages that cannot be connected, or that return or take something other than they should. The message
// names the stage.
class StageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// An output of a stage, by its index among the tensors that the stage returns.
struct StageOutput {
  int stage = 0;
  int output = 0;
  friend auto operator<=>(const StageOutput&, const StageOutput&) = default;
};

class Wiring {
 public:
  // Makes a chain of stages. Throws StageError unless there is at least one.
  explicit Wiring(int stages);

  // Sets the arguments of a stage, in order. Throws StageError unless each is an output of an earlier stage, and listed
  // once.
  void connect(int stage, std::vector<StageOutput> arguments);

  // The values that are sent from one stage to another.
  struct Link {
    int from = 0;
    int to = 0;
    // The values in the order in which they are sent; none: all outputs of `from`.
    std::optional<std::vector<StageOutput>> values;
  };

  int stages() const { return static_cast<int>(arguments_.size()); }
  // Returns the arguments of a stage; none: all outputs of the previous stage.
  const std::optional<std::vector<StageOutput>>& arguments(int stage) const {
    return arguments_[static_cast<std::size_t>(stage)];
  }
  // Returns all links, ordered by `to` and then by `from`. Consecutive stages always have a link, even an empty one.
  const std::vector<Link>& links() const { return links_; }
  // Return the links that lead to a stage and those that lead away from it, in ascending order of the other end.
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
