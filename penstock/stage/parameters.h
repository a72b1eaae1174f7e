// Parameters that a stage has in common with its replicas: whole in each of them, with gradients averaged, or a shard
// in each, gathered when the stage computes.
//
// Reductions and gradients that wait for one are those of AccumulatedGradients (accumulation.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "penstock/stage/accumulation.h"
#include "penstock/stage/module.h"
#include "penstock/tensor/named_tensors.h"
#include "penstock/transport/transport.h"

namespace penstock::internal {

class ParameterSync {
 public:
  virtual ~ParameterSync() = default;

  // What an optimizer is to step.
  virtual const NamedTensors& parameters() const = 0;

  // Makes the module's parameters and buffers those of the group's first member, which were received when this was made.
  // Once, before the first step; it waits for nobody.
  virtual void adopt() = 0;

  // Throws StageError: see AccumulatedGradients.
  virtual void begin_step() = 0;
  virtual void end_step() = 0;
  // Starts to average over the replicas; finish_reduce waits for it.
  virtual void reduce() = 0;
  virtual void finish_reduce(Deadline deadline) = 0;

  // Starts to gather the parameters; finish_unshard waits for it, and throws StageError when nothing was started. Reshard
  // frees what was gathered.
  virtual void unshard() = 0;
  virtual void finish_unshard(Deadline deadline) = 0;
  virtual void reshard() = 0;

  // After a step that failed: forgets what is under way, and undoes begin_step if it was called. The values of gradients
  // are restored by the caller, and before this.
  virtual void rollback() = 0;
  // Continues with a group of the same members, when the ranks are connected anew.
  virtual void join(std::shared_ptr<Group> group) = 0;
};

// Both receive the parameters and buffers of the group's first member, for which all members wait until the deadline, and
// change nothing before adopt(). `shared` says which of the parameters other stages have too: they stay whole, and are
// reduced by SharedSums. A tensor that the module has under several names is one parameter.

std::unique_ptr<ParameterSync> replicate_parameters(const StageModule& module, const std::vector<bool>& shared,
                                                    int stage, std::shared_ptr<Group> group, Deadline deadline);

// After adopt() each member keeps a part of each parameter; the module's own have memory only while they are gathered.
std::unique_ptr<ParameterSync> shard_parameters(const StageModule& module, const std::vector<bool>& shared, int stage,
                                                std::shared_ptr<Group> group, Deadline deadline);

struct StageToShard {
  const StageModule* module = nullptr;
  std::vector<bool> shared;
  int stage = 0;
};
// Throws StageError for a parameter that cannot be sharded: those of a stage have one dtype, and each has memory that no
// other tensor of the stages has.
void require_shardable(const std::vector<StageToShard>& stages);

// A parameter that several stages have, as seen from one rank: its gradients are summed over the stages, and averaged
// over replicas.
class SharedSum {
 public:
  struct Groups {
    // All ranks of a replica that have it, where one tensor is in stages of several ranks: they meet before its gradient
    // is read. None otherwise.
    std::shared_ptr<Group> holders;
    // In all replicas, those that speak for a tensor. None when another rank speaks for this one's.
    std::shared_ptr<Group> speakers;
  };
  // This rank's tensors for it, of which those that are the same count once, with names for errors, and how many replicas
  // there are.
  SharedSum(const NamedTensors& own, Groups groups, int replicas);

  void begin_step() { gradients_.begin_step(); }
  // Waits for all ranks of the groups.
  void reduce(Deadline deadline);
  void end_step() { gradients_.end_step(); }
  void rollback() { gradients_.rollback(); }
  // Continues with groups of the same members, as the ranks have been connected anew.
  void join(Groups groups) { groups_ = std::move(groups); }

 private:
  AccumulatedGradients gradients_;
  Groups groups_;
  int replicas_;
};

}  // namespace penstock::internal
