// A part of a graph, ready to run: a list of calls with places for their values, so that running it looks up nothing by
// name, and lets go of each value after its last use.
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

class Code {
 public:
  // Runs `nodes` of the graph, in this order, on `inputs`. What they take besides comes from `held`: parameters, buffers
  // and constants, which stay. Throws ProgramError for a value that nothing makes.
  struct Held {
    int value = 0;
    c10::IValue content;
  };
  Code(std::shared_ptr<const Graph> graph, std::span<const int> nodes, std::span<const int> inputs,
       std::vector<Held> held, std::span<const Operand> outputs);
  ~Code();
  Code(const Code&) = delete;
  Code& operator=(const Code&) = delete;
  Code(Code&&) noexcept;
  Code& operator=(Code&&) noexcept;

  struct Mode {
    // Whether dropout drops and batch normalisation learns, where the export says that they do.
    bool training = true;
    // Around all of it; regions of the program's own hold inside.
    std::optional<Region::Autocast> autocast = std::nullopt;
    // Called with the number of each node after it, by who measures.
    std::function<void(int node)> after = nullptr;
  };
  // Any number of threads may run it at once. In a RandomScope each node has a scope of its own. Throws what operators
  // throw as ProgramError, which names the node and its module.
  std::vector<c10::IValue> run(std::vector<c10::IValue> inputs, const Mode& mode) const;

 private:
  struct Call;
  struct Plan;
  std::unique_ptr<const Plan> plan_;
};

}  // namespace penstock::internal
