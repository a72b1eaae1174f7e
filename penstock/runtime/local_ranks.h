// The ranks that this process runs, with their stages and connections. With thread ranks these are all ranks of all
// replicas. A process rank is the only one of its process.
//
// Ranks are numbered through the replicas: replica 0 has the ranks from 0 on, replica 1 those after them, and so on.
#pragma once

#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "penstock/device/streams.h"
#include "penstock/runtime/executor.h"
#include "penstock/schedule/schedule.h"
#include "penstock/stage/shared.h"
#include "penstock/stage/stage.h"
#include "penstock/stage/staged_model.h"
#include "penstock/transport/transport.h"

namespace penstock::internal {

struct LocalRank {
  // Number among the ranks of all replicas.
  int rank = 0;
  // Stages of this rank, by index. They are owned by the models of LocalRanks.
  std::map<int, PipelineStage*> stages = {};
  // The streams in which they compute.
  RankStreams streams = {};
  // The rest is set by connect_ranks.
  std::shared_ptr<Transport> transport = nullptr;
  // Ranks with the same stages in all replicas; null if there is one replica.
  std::shared_ptr<Group> counterparts = nullptr;
  // Ranks of the same replica; null for thread ranks, and if the replica has one rank.
  std::shared_ptr<Group> replica_group = nullptr;
  std::vector<StageSum> sums = {};
  Progress progress = {};
};

class LocalRanks {
 public:
  // Takes one model for each replica of this process. `transport` is that of a process rank, or null for thread ranks.
  // The schedule outlives this. Throws PipelineError if the stages are not those that the schedule places here, or a
  // shared parameter does not exist.
  LocalRanks(std::vector<StagedModel> models, const Schedule& schedule, std::shared_ptr<Transport> transport);
  LocalRanks(const LocalRanks&) = delete;
  LocalRanks& operator=(const LocalRanks&) = delete;

  const Schedule& schedule() const { return *schedule_; }
  const std::vector<StagedModel>& models() const { return models_; }
  const SharedParameters& shared_parameters() const { return models_.front().shared_parameters(); }
  bool are_threads() const { return transport_ == nullptr; }
  // Transport of the process rank; null for thread ranks.
  const std::shared_ptr<Transport>& process_transport() const { return transport_; }

  std::deque<LocalRank>& ranks() { return ranks_; }
  const std::deque<LocalRank>& ranks() const { return ranks_; }
  std::size_t size() const { return ranks_.size(); }
  // Returns nullptr for a rank of another process.
  const LocalRank* find(int rank) const;
  // Returns the devices with streams on which the ranks of this process compute, each once.
  std::vector<at::Device> devices() const;
  // Returns a point after all work that is in the streams of the ranks.
  StreamPoint point_after_all() const;
  // Returns true if a stage of this index is in this process.
  bool has_stage(int stage) const;

  int ranks_per_replica() const { return schedule_->ranks(); }
  // Number of replicas in all processes.
  int num_replicas() const;
  // Index of the first replica of this process among all replicas.
  int first_replica() const { return ranks_.front().rank / ranks_per_replica(); }
  // Position of a rank in its replica, and the first rank of that replica.
  int rank_in_replica(const LocalRank& rank) const { return rank.rank % ranks_per_replica(); }
  int first_rank_of_replica(const LocalRank& rank) const { return rank.rank - rank_in_replica(rank); }
  // Index of a rank's replica among the replicas of this process.
  std::size_t local_replica(const LocalRank& rank) const {
    return static_cast<std::size_t>(rank.rank / ranks_per_replica() - first_replica());
  }

 private:
  void place_stages();
  void require_stages_of_schedule() const;
  void require_shared_parameters() const;

  const Schedule* schedule_;
  std::shared_ptr<Transport> transport_;
  std::vector<StagedModel> models_;
  // Executors point to its elements, so they never move.
  std::deque<LocalRank> ranks_;
};

// Returns a parameter of a stage. Throws PipelineError if it has none of that name.
const at::Tensor& find_parameter(const PipelineStage& stage, const std::string& name);

}  // namespace penstock::internal
