// Partitions a graph into stages: which nodes each stage runs, and which values are sent between stages.
//
// A value is sent from the stage that produces it to those that use it, with these exceptions:
// - Parameters, buffers and constants belong to each stage that uses them.
// - A cheap value without gradient that depends on constants alone, such as a causal mask, is recomputed in each stage
//   that uses it. So is arithmetic on sizes if the stage has the tensor whose size it is; other numbers are sent.
// - A value that a later stage mutates in place is sent by the last earlier stage that has written to it. The receiving
//   stage recreates its views, so that they see what was written; a detached view that was written to is sent itself,
//   together with the gradient of what was written.
#pragma once

#include <vector>

#include "penstock/program/reader/exported_program.h"
#include "penstock/stage/wiring.h"

namespace penstock::internal {

struct StagePartition {
  // Nodes in execution order, including those that other stages compute too.
  std::vector<int> nodes;
  // Values that the stage takes. The first stage takes the user inputs.
  std::vector<int> arguments;
  // Origins of the arguments; empty for the first stage.
  std::vector<StageOutput> sources;
  // Values that later stages take from this one.
  std::vector<int> results;
  // Indices in ExportedProgram::inputs of the parameters, buffers and constants that the stage has.
  std::vector<int> weights;
  // Indices in ExportedProgram::outputs of the mutations that the stage performs.
  std::vector<int> writes;
};

// Partitions a program. `stages` has the stage of each node, numbered from 0 without gaps. With `transmit`, a parameter
// that several stages use belongs to the first of them, which sends it to the others. Throws ProgramError if the
// program cannot be partitioned so; the error names the node or the buffer and both stages.
std::vector<StagePartition> partition(const ExportedProgram& exported, std::vector<int> stages, bool transmit = false);

}  // namespace penstock::internal
