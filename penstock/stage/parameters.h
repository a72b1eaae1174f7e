// Parameters that a stage has in common with its replicas: whole in each of them, with gradients averaged, or a shard
// in each, gathered when the stage computes.
//
// A reduction is of what a step has contributed. Gradients that earlier steps have reduced are set aside meanwhile, and
// added again; those of steps that did not reduce wait in .grad for the next that does.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "penstock/stage/module.h"
#include "penstock/transport/transport.h"

namespace penstock {

class ParameterSync {
 public:
  virtual ~ParameterSync() = default;

  // What an optimizer is to step.
  virtual const StageModule::NamedTensors& parameters() const = 0;

  virtual void begin_step() = 0;
  // Starts to average over the replicas; finish_reduce waits for it.
  virtual void reduce() = 0;
  virtual void finish_reduce(Deadline deadline) = 0;

  // Starts to gather the parameters; finish_unshard waits for it, and throws StageError when nothing was started. Reshard
  // frees what was gathered.
  virtual void unshard() = 0;
  virtual void finish_unshard(Deadline deadline) = 0;
  virtual void reshard() = 0;

  // After a step that failed: forgets what is under way and, when the step had begun by begin_step, undoes that; gradients
  // are the caller's to put back. Then goes on with a group of the same members, if the ranks are connected anew.
  virtual void abandon(bool had_begun) = 0;
  virtual void join(std::shared_ptr<Group> group) = 0;
};

// Both make parameters and buffers those of the group's first member, for which all members wait until the deadline.
// `shared` says which of the parameters other stages have too: they stay whole, and are reduced by SharedSums.

std::unique_ptr<ParameterSync> replicate_parameters(const StageModule& module, const std::vector<bool>& shared,
                                                    std::shared_ptr<Group> group, Deadline deadline);

// From now on each member keeps a part of each parameter; the module's own have memory only while they are gathered.
std::unique_ptr<ParameterSync> shard_parameters(const StageModule& module, const std::vector<bool>& shared, int stage,
                                                std::shared_ptr<Group> group, Deadline deadline);

// A gradient as it is summed over ranks, and as optimizers take it: that of an embedding may be sparse.
at::Tensor dense(const at::Tensor& gradient);

// Gradients of which only what a step contributes is reduced.
class Contribution {
 public:
  explicit Contribution(std::vector<at::Tensor> parameters);

  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  // Sets aside what has been reduced.
  void begin_step();
  // Adds it again to what has been reduced now.
  void end_reduction();
  // After a step that failed: what is set aside is what it was before.
  void undo_step();

 private:
  struct State {
    std::vector<at::Tensor> set_aside;
    // Whether .grad holds what has not been reduced.
    bool unreduced = false;
  };
  std::vector<at::Tensor> parameters_;
  State now_;
  State before_step_;
};

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
  // This rank's tensors for it, of which those that are the same count once, and how many replicas there are.
  SharedSum(const std::vector<at::Tensor>& own, Groups groups, int replicas);

  void begin_step() { contribution_.begin_step(); }
  // Waits for all ranks of the groups.
  void reduce(Deadline deadline);
  void undo_step() { contribution_.undo_step(); }
  // Goes on with groups of the same members, as the ranks have been connected anew.
  void join(Groups groups) { groups_ = std::move(groups); }

 private:
  Contribution contribution_;
  Groups groups_;
  int replicas_;
};

}  // namespace penstock
