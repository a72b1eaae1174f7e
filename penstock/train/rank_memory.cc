#include "penstock/train/rank_memory.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "penstock/train/memory_prediction.h"

namespace penstock::internal {
namespace {

// Returns the bytes of the largest activation message that a stage has sent.
double largest_message(const Schedule& schedule, const Record& record, int stage) {
  const int rank = schedule.placement().rank_of(stage);
  const auto actions = schedule.actions(rank);
  const std::vector<ActionRecord>& recorded = record[static_cast<std::size_t>(rank)];
  std::int64_t bytes = 0;
  for (std::size_t i = 0; i < recorded.size(); ++i) {
    const bool is_sent = actions[i].computation == Computation::SendForward && actions[i].stage == stage;
    if (is_sent) bytes = std::max(bytes, recorded[i].bytes);
  }
  return static_cast<double>(bytes);
}

}  // namespace

std::vector<StageMemory> memory_of_stages(const Schedule& schedule, const TrainedStages& trained,
                                          const MemoryWatch& watch, const TrainingProcesses& processes,
                                          const Record* last, bool sharded) {
  std::vector<StageMemory> stages(static_cast<std::size_t>(schedule.stages()));
  for (const TrainedStage& local : trained) {
    if (local.replica != 0) continue;
    const int index = local.stage->stage_index();
    StageMemory& stage = stages[static_cast<std::size_t>(index)];
    stage.saved_activations = static_cast<double>(watch.saved_activations(index));
    stage.weight_inputs = static_cast<double>(watch.weight_inputs(index));
    stage.recomputation_inputs = static_cast<double>(watch.recomputation_inputs(index));
    stage.forward_workspace = static_cast<double>(watch.forward_workspace(index));
    stage.backward_workspace = static_cast<double>(watch.backward_workspace(index));
    stage.update_workspace = static_cast<double>(watch.update_workspace(index));
    if (last != nullptr) stage.message = largest_message(schedule, *last, index);
    for (const auto& [name, parameter] : local.stage->parameters()) {
      stage.parameters += static_cast<double>(parameter.nbytes());
      if (parameter.requires_grad()) stage.gradients += static_cast<double>(parameter.nbytes());
    }
    for (const auto& [name, state] : local.optimizer.state()) stage.optimizer += static_cast<double>(state.nbytes());
    if (!sharded || processes.replicas() == 1) continue;
    for (const auto& [name, parameter] : local.stage->module().parameters) {
      stage.unsharded += static_cast<double>(parameter.nbytes());
    }
  }
  // Each process has filled in its own stages.
  std::vector<double*> numbers;
  for (StageMemory& stage : stages) {
    for (double* number :
         {&stage.parameters, &stage.optimizer, &stage.gradients, &stage.unsharded, &stage.saved_activations,
          &stage.weight_inputs, &stage.recomputation_inputs, &stage.forward_workspace, &stage.backward_workspace,
          &stage.update_workspace, &stage.message}) {
      numbers.push_back(number);
    }
  }
  processes.sum_in_place(numbers);
  for (std::size_t i = 0; i < stages.size(); ++i) {
    StageMemory& stage = stages[i];
    // Estimates of what did not occur: a weight gradient needs at most what the whole backward does, and a forward that is
    // recomputed saves its input, and its output until that has been sent.
    if (stage.weight_inputs == 0) stage.weight_inputs = stage.saved_activations;
    if (stage.recomputation_inputs == 0) {
      stage.recomputation_inputs = stage.message + (i > 0 ? stages[i - 1].message : 0);
    }
  }
  return stages;
}

std::vector<RankMemory> memory_of_ranks(const Schedule& schedule, const std::vector<StageMemory>& stages,
                                        const TrainedStages& trained, const MemoryWatch& watch,
                                        const TrainingProcesses& processes) {
  const auto ranks = static_cast<std::size_t>(schedule.ranks());
  std::vector<double> measured(ranks, 0);
  for (const TrainedStage& local : trained) {
    if (local.replica != 0) continue;
    measured[static_cast<std::size_t>(local.rank)] = static_cast<double>(watch.peak(local.rank));
  }
  measured = processes.sum(std::move(measured));
  std::vector<RankMemory> memory(ranks);
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    const double predicted =
        predicted_bytes(schedule, static_cast<int>(rank), stages, /*between_processes=*/!processes.are_threads());
    memory[rank] = {.measured = static_cast<std::int64_t>(measured[rank]),
                    .predicted = static_cast<std::int64_t>(predicted)};
  }
  return memory;
}

void add_sizes(Costs& costs, const Schedule& schedule, const std::vector<StageMemory>& stages) {
  costs.ranks.resize(static_cast<std::size_t>(schedule.ranks()));
  for (std::size_t i = 0; i < costs.stages.size() && i < stages.size(); ++i) {
    StageCosts& stage = costs.stages[i];
    const StageMemory& memory = stages[i];
    stage.activation_bytes = memory.saved_activations;
    stage.weight_bytes = memory.weight_inputs;
    stage.input_bytes = memory.recomputation_inputs;
    stage.parameter_bytes = memory.parameters;
    stage.gradient_bytes = memory.gradients;
    stage.optimizer_bytes = memory.optimizer;
    RankCosts& rank = costs.ranks[static_cast<std::size_t>(schedule.placement().rank_of(static_cast<int>(i)))];
    rank.buffer_bytes = std::max({rank.buffer_bytes, memory.forward_workspace, memory.backward_workspace});
  }
}

}  // namespace penstock::internal
