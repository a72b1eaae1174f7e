#include "penstock/train/trained_stages.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <exception>
#include <map>
#include <utility>

#include "penstock/device/streams.h"
#include "penstock/tensor/intra_op_threads.h"

namespace penstock::internal {

TrainedStages::TrainedStages(const Pipeline& pipeline, const OptimizerOptions& optimizer,
                             const TrainingProcesses& processes, MemoryWatch& memory, int intra_op_threads)
    : memory_(memory), num_stages_(pipeline.schedule().stages()), intra_op_threads_(intra_op_threads) {
  for (int local = 0; local < pipeline.replicas(); ++local) {
    for (const PipelineStage& stage : pipeline.stages(local)) {
      const int rank = pipeline.schedule().placement().rank_of(stage.stage_index());
      stages_.push_back({.index = stages_.size(),
                         .replica = processes.first_replica() + local,
                         .local_replica = local,
                         .rank = rank,
                         .stage = &stage,
                         .optimizer = Optimizer(optimizer, stage.parameters())});
      // The weights of an exported model were read before there were ranks to count them for.
      for (const auto* tensors : {&stage.parameters(), &stage.module().parameters, &stage.module().buffers}) {
        for (const auto& [name, tensor] : *tensors) memory_.adopt(tensor, rank, local);
      }
    }
  }
  std::vector<at::Device> devices;
  for (const TrainedStage& stage : stages_) devices.push_back(stage.stage->device());
  devices_ = RankStreams(devices).devices();
  std::map<std::pair<int, int>, std::vector<TrainedStage*>> by_rank;
  for (TrainedStage& stage : stages_) by_rank[{stage.replica, stage.rank}].push_back(&stage);
  for (auto& [rank, stages] : by_rank) by_rank_.push_back(std::move(stages));
  const int others = static_cast<int>(by_rank_.size()) - 1;
  if (others > 0) threads_ = std::make_unique<RankThreads>(others, intra_op_threads);
}

void TrainedStages::run_rank(std::size_t index, const std::vector<c10::Stream>& streams,
                             const std::function<void(TrainedStage&)>& act) {
  const std::vector<TrainedStage*>& stages = by_rank_[index];
  const IntraOpThreads threads(intra_op_threads_);
  const MemoryWatch::Scope scope(memory_, stages.front()->rank, stages.front()->local_replica);
  const c10::MultiStreamGuard on_streams(streams);
  for (TrainedStage* stage : stages) {
    const c10::DeviceGuard on_device(stage->stage->device());
    act(*stage);
  }
}

void TrainedStages::for_each_in_parallel(const std::function<void(TrainedStage&)>& act) {
  std::vector<std::exception_ptr> failures(by_rank_.size());
  std::vector<c10::Stream> streams;
  for (const at::Device device : devices_) streams.push_back(current_stream(device));
  const auto run = [&](std::size_t index) {
    try {
      run_rank(index, streams, act);
    } catch (...) {
      failures[index] = std::current_exception();
    }
  };
  if (threads_) threads_->start([&](int thread) { run(static_cast<std::size_t>(thread) + 1); });
  run(0);
  if (threads_) threads_->join();
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

void TrainedStages::step_optimizers(double learning_rate) {
  for_each_in_parallel([&](TrainedStage& stage) {
    memory_.measure_update(stage.stage->stage_index(), stage.rank, stage.local_replica,
                           [&] { stage.optimizer.step(learning_rate); });
  });
}

SavedState TrainedStages::save_written_tensors() const {
  SavedState saved;
  for (const TrainedStage& stage : stages_) {
    for (const auto& [name, tensor] : stage.stage->module().written_tensors()) saved.add_values(tensor);
  }
  return saved;
}

std::vector<StageSize> TrainedStages::sizes(const TrainingProcesses& processes) const {
  std::vector<double> numbers(2 * static_cast<std::size_t>(num_stages_), 0);
  for (const TrainedStage& stage : stages_) {
    if (stage.replica != 0) continue;
    const std::size_t first = 2 * static_cast<std::size_t>(stage.stage->stage_index());
    for (const auto& [name, parameter] : stage.stage->module().parameters) {
      numbers[first] += 1;
      numbers[first + 1] += static_cast<double>(parameter.numel());
    }
  }
  numbers = processes.sum(std::move(numbers));
  std::vector<StageSize> sizes;
  for (std::size_t i = 0; i < numbers.size(); i += 2) {
    sizes.push_back(
        {.parameters = static_cast<std::int64_t>(numbers[i]), .elements = static_cast<std::int64_t>(numbers[i + 1])});
  }
  return sizes;
}

}  // namespace penstock::internal
