// A parameter that several stages have, as seen from one rank: its gradients are summed over the stages and averaged
// over replicas.
#pragma once

#include <memory>
#include <utility>

#include "penstock/stage/accumulation.h"
#include "penstock/stage/module.h"
#include "penstock/transport/transport.h"

namespace penstock::internal {

// Used by the thread of its rank, and between steps by the thread that calls the pipeline.
class SharedSum {
 public:
  struct Groups {
    // The ranks of a replica that have the parameter, where stages of several ranks have the same tensor. They
    // synchronise before its gradient is read. Null otherwise.
    std::shared_ptr<Group> owners;
    // The ranks of all replicas that represent a tensor in the reduction. Null when another rank represents this one's.
    std::shared_ptr<Group> representatives;
  };
  // `tensors` are this rank's tensors for the parameter, with names for errors. Those that are the same count once.
  SharedSum(const NamedTensors& tensors, Groups groups, int replicas);

  void begin_step() { gradients_.begin_step(); }
  // Blocks until all ranks of the groups have called it.
  void reduce(Deadline deadline);
  void end_step() { gradients_.end_step(); }
  void rollback() { gradients_.rollback(); }
  // Continues with new groups of the same members, when the ranks have been connected again.
  void join(Groups groups) { groups_ = std::move(groups); }

 private:
  AccumulatedGradients gradients_;
  Groups groups_;
  int replicas_;
};

}  // namespace penstock::internal
