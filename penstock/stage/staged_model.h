// A StagedModel is a whole model cut into stages: the stages of this process, how all stages are connected, and which
// parameters several of them share. A Pipeline takes one, so none of the three can be left out.
//
//   StagedModel chain = std::move(stages);                       // a std::vector<PipelineStage>, each feeding the next
//   StagedModel skips(std::move(stages), wiring);                // connected as the wiring says
//   StagedModel tied(std::move(stages), Wiring(4), {{{0, "embedding.weight"}, {3, "head.weight"}}});
//   StagedModel exported = pipe.build();                         // see Pipe: all three come from the exported program
//
// It is movable and not copyable, as stages are.
#pragma once

#include <vector>

#include "penstock/stage/shared.h"
#include "penstock/stage/stage.h"
#include "penstock/stage/wiring.h"

namespace penstock {

class StagedModel {
 public:
  // Connects the stages as a chain. The conversion is implicit, so that a list of stages can be passed where a model is
  // expected. Throws StageError if there are no stages.
  StagedModel(std::vector<PipelineStage> stages);  // NOLINT(google-explicit-constructor)

  // Process ranks pass their own stages only, in ascending order, and the same wiring and shared parameters on every
  // rank. `shared` names parameters for which each stage has its own copy: their gradients are summed over the stages.
  // A tensor that is a parameter of several of these stages is shared without being named; process ranks name it.
  StagedModel(std::vector<PipelineStage> stages, Wiring wiring, SharedParameters shared = {});

  const std::vector<PipelineStage>& stages() const { return stages_; }
  std::vector<PipelineStage>& stages() { return stages_; }
  const Wiring& wiring() const { return wiring_; }
  // Returns the parameters that were named and those that are one tensor in several of the stages. Entries that have a
  // parameter of a stage in common are merged.
  const SharedParameters& shared_parameters() const { return shared_; }

 private:
  std::vector<PipelineStage> stages_;
  Wiring wiring_;
  SharedParameters shared_;
};

}  // namespace penstock
