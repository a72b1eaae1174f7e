#include "penstock/train/memory_prediction.h"

#include <algorithm>
#include <set>
#include <utility>

#include "penstock/transport/send_queue.h"

namespace penstock::internal {
namespace {

// Walks the actions of a rank and tracks how many bytes are allocated.
class MemoryWalk {
 public:
  MemoryWalk(const Schedule& schedule, std::span<const StageMemory> stages, bool between_processes)
      : schedule_(schedule), stages_(stages), between_processes_(between_processes) {
    double largest = 0;
    for (const StageMemory& stage : stages) largest = std::max(largest, stage.message);
    max_sent_ =
        std::min(static_cast<double>(SendQueue::kReapBytes), largest * static_cast<double>(SendQueue::kReapSends));
  }

  void run(int rank) {
    recomputed_ = recomputed_microbatches(schedule_, rank);
    for (const Action& action : schedule_.actions(rank)) {
      for_each_part(action, [&](const Action& part) { run(part); });
    }
  }
  // Bytes of receive buffers, which are reused for later messages.
  double receive_buffers() const { return between_processes_ ? peak_received_ : 0; }
  double peak() const { return peak_ + receive_buffers(); }

 private:
  void run(const Action& part) {
    const StageMemory& stage = of(part.stage);
    if (part.is_recv()) {
      received_ += of(edge_under(part).from).message;
      peak_received_ = std::max(peak_received_, received_);
    } else if (part.computation == Computation::SendBackward) {
      sent_ += of(edge_under(part).from).message;
    } else if (part.computation == Computation::Unshard) {
      // The shards are first gathered into a flat buffer.
      raise(2 * stage.unsharded);
      alive_ += stage.unsharded;
    } else if (part.computation == Computation::Reshard) {
      alive_ -= stage.unsharded;
    } else if (part.computation == Computation::ReduceGrad) {
      // The full gradients are copied into one buffer, which stays until the end of the step, as does their shard.
      if (stage.unsharded == 0 || with_gradients_.erase(part.stage) == 0) return;
      raise(stage.unsharded);
      alive_ += stage.gradients;
    } else if (is_forward(part)) {
      const bool is_recomputed = recomputed_.contains({part.stage, part.microbatch});
      alive_ += is_recomputed ? stage.recomputation_inputs : stage.saved_activations;
      raise(stage.forward_workspace);
    } else if (part.computation == Computation::Recompute) {
      alive_ += stage.saved_activations - stage.recomputation_inputs;
      raise(stage.forward_workspace);
    } else if (part.is_compute()) {
      if (makes_weight_gradient(part) && with_gradients_.insert(part.stage).second) {
        alive_ += stage.unsharded > 0 ? stage.unsharded : stage.gradients;
      }
      raise(stage.backward_workspace);
      const StageGraph& graph = schedule_.graph();
      if (makes_input_gradient(part)) received_ -= bytes_across(graph.out_edges(part.stage));
      if (part.computation == Computation::InputBackward) alive_ += stage.weight_inputs - stage.saved_activations;
      if (makes_weight_gradient(part)) {
        received_ -= bytes_across(graph.in_edges(part.stage));
        alive_ -= part.computation == Computation::WeightBackward ? stage.weight_inputs : stage.saved_activations;
        // Until now, the output was counted among the saved activations.
        sent_ += bytes_across(graph.out_edges(part.stage));
      }
    }
  }

  const StageMemory& of(int stage) const { return stages_[static_cast<std::size_t>(stage)]; }
  void raise(double workspace) {
    peak_ = std::max(peak_, alive_ + workspace + (between_processes_ ? std::min(sent_, max_sent_) : 0));
  }
  // Returns the bytes of the messages along the edges that lead to another rank.
  double bytes_across(std::span<const int> edges) const {
    const Placement& placement = schedule_.placement();
    double bytes = 0;
    for (const int edge : edges) {
      const Edge& ends = schedule_.graph().edges()[static_cast<std::size_t>(edge)];
      if (placement.rank_of(ends.from) != placement.rank_of(ends.to)) bytes += of(ends.from).message;
    }
    return bytes;
  }

  const Schedule& schedule_;
  std::span<const StageMemory> stages_;
  bool between_processes_;
  double alive_ = 0;
  double peak_ = 0;
  double received_ = 0;
  double peak_received_ = 0;
  double sent_ = 0;
  double max_sent_ = 0;
  std::set<std::pair<int, int>> recomputed_;
  // Stages whose full gradients are allocated.
  std::set<int> with_gradients_;
};

}  // namespace

double predicted_bytes(const Schedule& schedule, int rank, std::span<const StageMemory> stages,
                       bool between_processes) {
  MemoryWalk walk(schedule, stages, between_processes);
  walk.run(rank);
  double resident = 0;
  double gradients = 0;
  double update_workspace = 0;
  for (const int stage : schedule.placement().stages_of(rank)) {
    resident += stages[static_cast<std::size_t>(stage)].parameters + stages[static_cast<std::size_t>(stage)].optimizer;
    gradients += stages[static_cast<std::size_t>(stage)].gradients;
    update_workspace = std::max(update_workspace, stages[static_cast<std::size_t>(stage)].update_workspace);
  }
  return resident + std::max(walk.peak(), gradients + update_workspace + walk.receive_buffers());
}

}  // namespace penstock::internal
