// Strategies that split a program into stages. Each returns the stage of every node, for the constructor of Pipe;
// pipeline() in pipe.h combines the two.
//
//   Pipe pipe(program, split_evenly(program, 4, estimated_costs(program)));
//
// A stage computes at least one tensor: consecutive split points without computation between them count as one.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "penstock/program/costs.h"
#include "penstock/program/program.h"

namespace penstock {

// A split before a module runs, or after it.
enum class SplitPoint { BEGINNING, END };

// Split points by the fully qualified names of modules. A module that is called twice is split at each call.
using SplitSpec = std::vector<std::pair<std::string, SplitPoint>>;

// Splits at modules, and at the pipe_split() calls of the model. Throws ProgramError for a module that is not called,
// and suggests the most similar name.
std::vector<int> split_at(const Program& program, const SplitSpec& spec);
// Splits into `stages` stages of about equal time. Among the splits whose slowest stage takes at most a tenth longer
// than the optimum, returns the one with the fewest tensors to send, then the fewest modules that are cut in two (so
// that stages start with blocks), then the fewest bytes to send. Throws ProgramError if the program cannot have so many
// stages. Takes O(stages · nodes²) time up to 2000 nodes, and O(stages³) above.
std::vector<int> split_evenly(const Program& program, int stages, std::span<const NodeCost> costs);
// Splits by a function from a node to its stage. Stages without nodes are dropped. Throws ProgramError for a negative
// stage.
std::vector<int> split_by(const Program& program, const std::function<int(const Node& node)>& stage_of);

}  // namespace penstock
