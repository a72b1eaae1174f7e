#include "penstock/train/rank_memory.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <set>
#include <utility>

#include "penstock/schedule/memory.h"
#include "penstock/transport/send_queue.h"

namespace penstock::internal {
namespace {

// Returns the size of the largest activation that leaves a stage: as it was sent, or received on the same rank.
double boundary_bytes(const Schedule& schedule, const Record& record, int stage) {
  const StageGraph& graph = schedule.graph();
  const auto rank = static_cast<std::size_t>(schedule.placement().rank_of(stage));
  const auto actions = schedule.actions(static_cast<int>(rank));
  double bytes = 0;
  for (std::size_t i = 0; i < record[rank].size(); ++i) {
    const auto measured = static_cast<double>(record[rank][i].bytes);
    const Action& action = actions[i];
    if (action.computation == Computation::SendForward && action.stage == stage) bytes = std::max(bytes, measured);
    if (action.computation != Computation::Forward) continue;
    const auto edges = graph.in_edges(action.stage);
    const bool is_received = std::ranges::any_of(
        edges, [&](int edge) { return graph.edges()[static_cast<std::size_t>(edge)].from == stage; });
    if (is_received) bytes = std::max(bytes, measured / static_cast<double>(edges.size()));
  }
  return bytes;
}

// `counted` has the storages of buffers that were counted for earlier stages of the rank, to which stages may share
// them.
void measure_sizes(const TrainedStage& trained, const MemoryWatch& watch, const MeasuredRun& run, bool sharded,
                   std::set<const void*>& counted, StageCosts& sizes) {
  const int index = trained.stage->stage_index();
  sizes.activation_bytes = static_cast<double>(watch.saved_activations(index));
  sizes.weight_bytes = static_cast<double>(watch.weight_inputs(index));
  sizes.input_bytes = static_cast<double>(watch.recomputation_inputs(index));
  sizes.forward_workspace = static_cast<double>(watch.forward_workspace(index));
  sizes.backward_workspace = static_cast<double>(watch.backward_workspace(index));
  sizes.update_workspace = static_cast<double>(watch.update_workspace(index));
  std::int64_t state = 0;
  for (const auto& [name, tensor] : trained.optimizer.state()) state += static_cast<std::int64_t>(tensor.nbytes());
  const bool has_stepped = state > 0;
  for (const auto& [name, parameter] : trained.stage->parameters()) {
    const auto bytes = static_cast<std::int64_t>(parameter.nbytes());
    sizes.parameter_bytes += static_cast<double>(bytes);
    if (!parameter.requires_grad()) continue;
    sizes.gradient_bytes += static_cast<double>(bytes);
    if (!has_stepped) state += state_bytes(run.optimizer, bytes);
  }
  sizes.optimizer_bytes = static_cast<double>(state);
  // Buffers are in memory all the time, like parameters.
  for (const auto& [name, buffer] : trained.stage->module().buffers) {
    if (!counted.insert(buffer.storage().unsafeGetStorageImpl()).second) continue;
    sizes.parameter_bytes += static_cast<double>(buffer.nbytes());
  }
  if (sharded) {
    for (const auto& [name, parameter] : trained.stage->module().parameters) {
      sizes.unsharded_bytes += static_cast<double>(parameter.nbytes());
    }
  }
  // With shards, the full gradients that are not reduced yet, and the shard of them that the optimizer sees.
  if (run.accumulates) sizes.accumulated_bytes = sizes.gradient_bytes + sizes.unsharded_bytes;
}

}  // namespace

void add_sizes(Costs& costs, const Schedule& schedule, const TrainedStages& trained, const MemoryWatch& watch,
               const TrainingProcesses& processes, const MeasuredRun& run) {
  const auto stages = static_cast<std::size_t>(schedule.stages());
  costs.stages.resize(stages);
  costs.ranks.resize(static_cast<std::size_t>(schedule.ranks()));
  for (StageCosts& stage : costs.stages) stage.weight_bytes = 0;
  std::vector<double> boundaries(stages, 0);
  double loss_bytes = 0;
  std::map<int, std::set<const void*>> counted;
  for (const TrainedStage& local : trained) {
    if (local.replica != 0) continue;
    const auto index = static_cast<std::size_t>(local.stage->stage_index());
    measure_sizes(local, watch, run, run.sharded && processes.replicas() > 1, counted[local.rank], costs.stages[index]);
    if (run.last != nullptr) boundaries[index] = boundary_bytes(schedule, *run.last, local.stage->stage_index());
    if (index + 1 == stages) loss_bytes = static_cast<double>(watch.loss_bytes());
  }
  // Each process has filled in its own stages.
  std::vector<double*> numbers{&loss_bytes};
  for (std::size_t i = 0; i < stages; ++i) {
    StageCosts& stage = costs.stages[i];
    for (double* number :
         {&stage.parameter_bytes, &stage.optimizer_bytes, &stage.gradient_bytes, &stage.accumulated_bytes,
          &stage.unsharded_bytes, &stage.activation_bytes, &*stage.weight_bytes, &stage.input_bytes,
          &stage.forward_workspace, &stage.backward_workspace, &stage.update_workspace, &boundaries[i]}) {
      numbers.push_back(number);
    }
  }
  processes.sum_in_place(numbers);
  double largest = 0;
  for (std::size_t i = 0; i < stages; ++i) {
    StageCosts& stage = costs.stages[i];
    // Without a measurement: a weight gradient is estimated to need what the whole backward does. A forward that is
    // recomputed keeps its output, or what the loss keeps.
    if (*stage.weight_bytes == 0) stage.weight_bytes.reset();
    if (stage.input_bytes == 0) stage.input_bytes = i + 1 == stages ? loss_bytes : boundaries[i];
    if (!processes.are_threads()) stage.message_bytes = boundaries[i];
    largest = std::max(largest, stage.message_bytes);
  }
  for (RankCosts& rank : costs.ranks) {
    rank.sent_bytes =
        std::min(static_cast<double>(SendQueue::kReapBytes), largest * static_cast<double>(SendQueue::kReapSends));
  }
}

std::vector<RankMemory> memory_of_ranks(const Schedule& schedule, const Costs& costs, const TrainedStages& trained,
                                        const MemoryWatch& watch, const TrainingProcesses& processes) {
  std::vector<double> measured(static_cast<std::size_t>(schedule.ranks()), 0);
  for (const TrainedStage& local : trained) {
    if (local.replica != 0) continue;
    measured[static_cast<std::size_t>(local.rank)] = static_cast<double>(watch.peak(local.rank));
  }
  measured = processes.sum(std::move(measured));
  std::vector<RankMemory> memory;
  for (std::size_t rank = 0; rank < measured.size(); ++rank) {
    memory.push_back(
        {.measured = static_cast<std::int64_t>(measured[rank]),
         .predicted =
             watch.has_devices() ? 0 : static_cast<std::int64_t>(peak_bytes(schedule, costs, static_cast<int>(rank)))});
  }
  return memory;
}

}  // namespace penstock::internal
