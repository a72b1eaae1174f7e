// A graph in stages: what each of them runs, and what goes from one to another.
//
// A value goes from the stage that makes it to those that use it, with exceptions:
// - Parameters, buffers and constants are held by each stage that uses them.
// - What is cheap, needs no gradient and comes from constants alone, such as a causal mask, is computed again in each
//   stage that uses it. So is arithmetic on sizes, where the tensor whose size it is comes along anyway; other numbers
//   travel.
// - A value that a later stage writes to in place comes from the last stage before that has written to it. Views of it are
//   made anew from it, so that they see what was written; but a detached view that was written to comes itself, with the
//   gradient of what was written.
#pragma once

#include <vector>

#include "penstock/program/partition/effects.h"
#include "penstock/program/reader/exported.h"
#include "penstock/stage/wiring.h"

namespace penstock::internal {

struct StagePart {
  // In the order in which they run, with those that other stages run too.
  std::vector<int> nodes;
  // The values that it takes, and where they come from; the first stage takes the inputs that the user gives.
  std::vector<int> arguments;
  std::vector<StageOutput> sources;
  // The values that later stages take from it.
  std::vector<int> results;
  // By their numbers in Exported: inputs that it holds, and outputs that are written to such.
  std::vector<int> held;
  std::vector<int> writes;
};

// `stages` has the stage of each node, from 0 on, and all of them are there. With `transmit`, a parameter that several
// stages use is held by the first, which sends it to the others. Throws ProgramError for what cannot be cut so, which names
// the node or the buffer and both stages.
std::vector<StagePart> partition(const Exported& exported, std::vector<int> stages, bool transmit = false);

}  // namespace penstock::internal
