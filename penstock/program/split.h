// Where to cut a program.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "penstock/program/costs.h"
#include "penstock/program/program.h"

namespace penstock {

// Before a module runs, or after it.
enum class SplitPoint { BEGINNING, END };

// By the names of modules. One that is called twice is cut at every call.
using SplitSpec = std::vector<std::pair<std::string, SplitPoint>>;

// Each gives the stage of each node. Stages without anything to compute, as between two marks in a row, there are none.
//
// At modules, and at the pipe_split() marks of the model. Throws ProgramError for a module that is not called, with the
// nearest name that is.
std::vector<int> split_at(const Program& program, const SplitSpec& spec);
// Cuts into so many stages of about the same time. Of the cuts whose slowest stage takes at most a tenth longer than it
// has to, returns the one that the fewest tensors cross, then the one that cuts the fewest modules in two (so that stages
// begin with blocks), then the one with the least to send. Throws ProgramError if there are not so many nodes.
std::vector<int> split_evenly(const Program& program, int stages, std::span<const NodeCost> costs);
// By a function from a node to its stage.
std::vector<int> split_by(const Program& program, const std::function<int(const Node& node)>& stage_of);

}  // namespace penstock
