// Synchronises the parameters of a stage with those of its replicas. They are either replicated, whole in each replica
// with averaged gradients, or sharded, a shard in each replica that is gathered when the stage computes.
//
// AccumulatedGradients (accumulation.h) defines what a reduction sums and what .grad shows between steps.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "penstock/stage/module.h"
#include "penstock/transport/transport.h"

namespace penstock::internal {

// Used by the thread of the stage's rank, and between steps by the thread that calls the pipeline.
class ParameterSync {
 public:
  virtual ~ParameterSync() = default;

  // Returns the parameters that an optimizer steps.
  virtual const NamedTensors& parameters() const = 0;

  // Overwrites the module's parameters and buffers with those of the group's first member, which were received by the
  // constructor. Called once, before the first step. Does not block.
  virtual void adopt() = 0;

  // Begins and ends a step that computes gradients. Throw StageError: see AccumulatedGradients.
  virtual void begin_step() = 0;
  virtual void end_step() = 0;
  // Starts to average gradients over the replicas; finish_reduce() waits for the result.
  virtual void reduce() = 0;
  virtual void finish_reduce(Deadline deadline) = 0;

  // Starts to gather the parameters; finish_unshard() waits for them, and throws StageError when nothing was started.
  // reshard() frees the gathered parameters. All three do nothing for replicated parameters.
  virtual void unshard() = 0;
  virtual void finish_unshard(Deadline deadline) = 0;
  virtual void reshard() = 0;

  // After a step that failed: drops collectives in flight, and reverts begin_step() if it was called. The caller has
  // restored gradients before.
  virtual void rollback() = 0;
  // Continues with a new group of the same members, when the ranks have been connected again.
  virtual void join(std::shared_ptr<Group> group) = 0;
};

// Both functions receive the parameters and buffers of the group's first member, for which all members wait until the
// deadline, and change nothing before adopt(). `shared` marks the parameters that other stages have too: they stay
// whole and are reduced by SharedSum. A tensor that the module has under several names is one parameter.

std::unique_ptr<ParameterSync> replicate_parameters(const StageModule& module, const std::vector<bool>& shared,
                                                    int stage, std::shared_ptr<Group> group, Deadline deadline);

// After adopt() each member keeps a shard of each parameter. The module's own parameters have memory only while they
// are gathered.
std::unique_ptr<ParameterSync> shard_parameters(const StageModule& module, const std::vector<bool>& shared, int stage,
                                                std::shared_ptr<Group> group, Deadline deadline);

struct StageToShard {
  // Outlives the call of require_shardable.
  const StageModule* module = nullptr;
  std::vector<bool> shared;
  int stage = 0;
};
// Throws StageError for a parameter that cannot be sharded. The sharded parameters of a stage have one dtype, and each
// has a storage that no other tensor of the stages has.
void require_shardable(const std::vector<StageToShard>& stages);

// Returns the name of a parameter in errors: "stage 1, parameter 'w'".
std::string parameter_name(int stage, const std::string& name);

}  // namespace penstock::internal
