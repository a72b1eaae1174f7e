// Runs nodes of a graph. Construction compiles them to a list of calls on numbered slots, so that a run looks up
// nothing by name and frees each value after its last use.
#pragma once

#include <ATen/core/ivalue.h>

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "penstock/program/graph.h"

namespace penstock::internal {

struct RecomputedModules;

class Interpreter {
 public:
  // A parameter, buffer or constant, which stays alive between runs.
  struct Weight {
    int value = 0;
    c10::IValue content;
  };
  // Runs `nodes`, in this order, on `inputs` and `weights`. Throws ProgramError for a value that nothing produces.
  Interpreter(std::shared_ptr<const Graph> graph, std::span<const int> nodes, std::span<const int> inputs,
              std::vector<Weight> weights, std::span<const Operand> outputs);
  ~Interpreter();
  Interpreter(const Interpreter&) = delete;
  Interpreter& operator=(const Interpreter&) = delete;
  Interpreter(Interpreter&&) noexcept;
  Interpreter& operator=(Interpreter&&) noexcept;

  struct Mode {
    // False turns off dropout and the updates of batch normalisation where the export has them on.
    bool training = true;
    // Dtype of autocast around the whole run, of the graph's type of device. Autocast regions of the program are nested
    // in it.
    std::optional<at::ScalarType> autocast = std::nullopt;
    // Modules that save their inputs only and are computed again in the backward; null for none.
    std::shared_ptr<const RecomputedModules> recomputed = nullptr;
    // Called with the index of each node after it has run, to measure it.
    std::function<void(int node)> after_node = nullptr;
  };
  // Runs the nodes and returns the outputs. Any number of threads may call it at once. Inside a RandomScope each node
  // has a nested scope. Rethrows an operator's exception as ProgramError, which names the node and its module.
  std::vector<c10::IValue> run(std::vector<c10::IValue> inputs, const Mode& mode) const;

 private:
  struct Call;
  struct Plan;
  // Shared with the graphs of runs whose modules are recomputed.
  std::shared_ptr<const Plan> plan_;
};

}  // namespace penstock::internal
