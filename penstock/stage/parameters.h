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

  // Forgets what is under way, after a step that failed.
  virtual void abandon() = 0;
};

// Parameters become those of the group's first member, and buffers too. `reduced` says which of the parameters are
// averaged here: those that stages share are not. Both wait for all members until the deadline.
std::unique_ptr<ParameterSync> replicate_parameters(const StageModule& module, const std::vector<bool>& reduced,
                                                    std::shared_ptr<Group> group, Deadline deadline);

// From now on each member keeps a part of each parameter; the module's own have memory only while they are gathered.
std::unique_ptr<ParameterSync> shard_parameters(const StageModule& module, int stage, std::shared_ptr<Group> group,
                                                Deadline deadline);

}  // namespace penstock
