// The processes of a training run, and the collectives that they perform between pipeline steps. With thread ranks
// there is one process, and every collective returns at once.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "penstock/transport/transport.h"

namespace penstock::internal {

// All processes construct one, and call its collectives in the same order. A collective throws PipelineError, which
// names the ranks that did not answer.
class TrainingProcesses {
 public:
  // `ranks` is the number of ranks of one replica, `thread_replicas` the number of replicas if the transport is null.
  // `steps_done` is read for error messages, and outlives this.
  TrainingProcesses(std::shared_ptr<Transport> transport, int ranks, int thread_replicas,
                    std::chrono::milliseconds timeout, const std::int64_t& steps_done);

  bool are_threads() const { return transport_ == nullptr; }
  // True on the process that prints progress and writes shared files (rank 0).
  bool is_coordinator() const { return index() == 0; }
  // Number of processes, and this process's index.
  int count() const { return transport_ == nullptr ? 1 : transport_->ranks(); }
  int index() const { return transport_ == nullptr ? 0 : transport_->rank(); }
  // Number of replicas in all processes, and the first one that has stages in this process.
  int replicas() const { return replicas_; }
  int first_replica() const { return index() / ranks_; }
  // Longest time that a process waits for another one, or for a device.
  std::chrono::milliseconds timeout() const { return timeout_; }
  // True if this process runs a rank of the first replica.
  bool has_rank(int rank) const { return are_threads() || index() == rank; }

  // Returns the element-wise sum over all processes.
  std::vector<double> sum(std::vector<double> numbers) const;
  void sum_in_place(const std::vector<double*>& numbers) const;
  // Overwrites the tensor with that of the process `root`. Not for thread ranks.
  void broadcast(const at::Tensor& tensor, int root) const;
  // Returns the shards of all replicas of this process's stages, concatenated. Not for thread ranks.
  at::Tensor gather_shards(const at::Tensor& shard) const;

 private:
  void complete(const std::function<std::unique_ptr<Work>()>& begin) const;

  std::shared_ptr<Transport> transport_;
  int ranks_;
  int replicas_;
  std::chrono::milliseconds timeout_;
  const std::int64_t& steps_done_;
  // All processes, and those that have the same stages in other replicas. Null for thread ranks.
  std::shared_ptr<Group> everyone_;
  std::shared_ptr<Group> peers_;
};

}  // namespace penstock::internal
