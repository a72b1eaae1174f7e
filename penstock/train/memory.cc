#include "penstock/train/memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/GradMode.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <mutex>
#include <optional>
#include <set>
#include <unordered_map>

#include "penstock/transport/send_queue.h"

namespace penstock::internal {
namespace {

// Walks a rank's list and adds up what is alive.
class MemoryWalk {
 public:
  MemoryWalk(const Schedule& schedule, std::span<const StageMemory> stages, bool between_processes)
      : schedule_(schedule), stages_(stages), between_processes_(between_processes) {
    double largest = 0;
    for (const StageMemory& stage : stages) largest = std::max(largest, stage.sent);
    most_sent_ =
        std::min(static_cast<double>(SendQueue::kReapBytes), largest * static_cast<double>(SendQueue::kReapSends));
  }

  void run(int rank) {
    for (const Action& action : schedule_.actions(rank)) {
      for_each_part(action, [&](const Action& part) { run(part); });
    }
  }
  // Bytes of messages that are kept for later ones.
  double kept_messages() const { return between_processes_ ? peak_received_ : 0; }
  double peak() const { return peak_ + kept_messages(); }

 private:
  void run(const Action& part) {
    const StageMemory& stage = of(part.stage);
    if (part.is_recv()) {
      received_ += of(edge_under(part).from).sent;
      peak_received_ = std::max(peak_received_, received_);
    } else if (part.computation == Computation::SendBackward) {
      sent_ += of(edge_under(part).from).sent;
    } else if (part.computation == Computation::Unshard) {
      // Shards are gathered into a buffer first.
      raise(2 * stage.unsharded);
      alive_ += stage.unsharded;
    } else if (part.computation == Computation::Reshard) {
      alive_ -= stage.unsharded;
    } else if (part.computation == Computation::ReduceGrad) {
      // Whole gradients are copied into one buffer, which stays until the end of the step, as does their shard.
      if (stage.unsharded == 0 || with_gradients_.erase(part.stage) == 0) return;
      raise(stage.unsharded);
      alive_ += stage.gradients;
    } else if (is_forward(part)) {
      alive_ += stage.kept;
      raise(stage.working_forward);
    } else if (part.is_compute()) {
      if (makes_weight_gradient(part) && with_gradients_.insert(part.stage).second) {
        alive_ += stage.unsharded > 0 ? stage.unsharded : stage.gradients;
      }
      raise(stage.working_backward);
      const StageGraph& graph = schedule_.graph();
      if (makes_input_gradient(part)) received_ -= bytes_across(graph.out_edges(part.stage));
      if (makes_weight_gradient(part)) {
        received_ -= bytes_across(graph.in_edges(part.stage));
        alive_ -= stage.kept;
        // Its output is among what it keeps until now.
        sent_ += bytes_across(graph.out_edges(part.stage));
      }
    }
  }

  const StageMemory& of(int stage) const { return stages_[static_cast<std::size_t>(stage)]; }
  void raise(double working) {
    peak_ = std::max(peak_, alive_ + working + (between_processes_ ? std::min(sent_, most_sent_) : 0));
  }
  // Returns the bytes of the messages along those of the edges that lead to another rank.
  double bytes_across(std::span<const int> edges) const {
    const Placement& placement = schedule_.placement();
    double bytes = 0;
    for (const int edge : edges) {
      const Edge& ends = schedule_.graph().edges()[static_cast<std::size_t>(edge)];
      if (placement.rank_of(ends.from) != placement.rank_of(ends.to)) bytes += of(ends.from).sent;
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
  double most_sent_ = 0;
  // Stages that have gradients of whole parameters.
  std::set<int> with_gradients_;
};

}  // namespace

double predicted_bytes(const Schedule& schedule, int rank, std::span<const StageMemory> stages,
                       bool between_processes) {
  MemoryWalk walk(schedule, stages, between_processes);
  walk.run(rank);
  double held = 0;
  double gradients = 0;
  double working_update = 0;
  for (const int stage : schedule.placement().stages_of(rank)) {
    held += stages[static_cast<std::size_t>(stage)].held;
    gradients += stages[static_cast<std::size_t>(stage)].gradients;
    working_update = std::max(working_update, stages[static_cast<std::size_t>(stage)].working_update);
  }
  return held + std::max(walk.peak(), gradients + working_update + walk.kept_messages());
}

struct MemoryWatch::CountsOfRank {
  std::atomic<std::int64_t> now = 0;
  std::atomic<std::int64_t> most = 0;
  std::atomic<std::int64_t> most_in_action = 0;
  // Of the first replica alone: threads that have asked which replica they work for.
  std::atomic<int> threads = 0;
};

// By replica and rank, and whose each piece of memory is. Pieces lie in several maps, so that ranks seldom meet at one.
struct MemoryWatch::Counts {
  struct Piece {
    // Index into `ranks`.
    int rank = 0;
    std::int64_t size = 0;
  };
  struct Map {
    std::mutex mutex;
    std::unordered_map<const void*, Piece> pieces;
  };

  Counts(int of_ranks, int of_stages, int of_replicas)
      : ranks(static_cast<std::size_t>(of_ranks) * static_cast<std::size_t>(of_replicas)),
        kept(static_cast<std::size_t>(of_stages)),
        working_forward(static_cast<std::size_t>(of_stages)),
        working_backward(static_cast<std::size_t>(of_stages)),
        working_update(static_cast<std::size_t>(of_stages)),
        ranks_of_replica(of_ranks) {
    for (auto& working : working_backward) working = kUnknown;
  }

  int index(int rank, int replica) const { return rank < 0 ? -1 : replica * ranks_of_replica + rank; }

  void add(int rank, std::int64_t size) {
    CountsOfRank& one = ranks[static_cast<std::size_t>(rank)];
    const std::int64_t now = one.now.fetch_add(size, std::memory_order_relaxed) + size;
    raise(one.most, now);
    raise(one.most_in_action, now);
  }

  static void raise(std::atomic<std::int64_t>& most, std::int64_t value) {
    std::int64_t known = most.load(std::memory_order_relaxed);
    while (value > known && !most.compare_exchange_weak(known, value, std::memory_order_relaxed)) {
    }
  }
  static void lower(std::atomic<std::int64_t>& least, std::int64_t value) {
    std::int64_t known = least.load(std::memory_order_relaxed);
    while (value < known && !least.compare_exchange_weak(known, value, std::memory_order_relaxed)) {
    }
  }
  static constexpr std::int64_t kUnknown = std::numeric_limits<std::int64_t>::max();

  void report(const void* data, std::int64_t size, int rank) {
    Map& map = maps[(reinterpret_cast<std::uintptr_t>(data) >> 8U) % maps.size()];
    std::optional<Piece> gone;
    {
      const std::lock_guard lock(map.mutex);
      // What was here before has gone, seen or not.
      if (const auto found = map.pieces.find(data); found != map.pieces.end()) {
        gone = found->second;
        map.pieces.erase(found);
      }
      if (size > 0 && rank >= 0) map.pieces.emplace(data, Piece{.rank = rank, .size = size});
    }
    if (gone) add(gone->rank, -gone->size);
    if (size > 0 && rank >= 0) add(rank, size);
  }

  std::vector<CountsOfRank> ranks;
  // By stage.
  std::vector<std::atomic<std::int64_t>> kept;
  std::vector<std::atomic<std::int64_t>> working_forward;
  std::vector<std::atomic<std::int64_t>> working_backward;
  std::vector<std::atomic<std::int64_t>> working_update;
  std::array<Map, 16> maps;
  int ranks_of_replica;
};

namespace {

// Of a thread, for libtorch's allocator to report to.
template <class Counts>
struct Reporter : c10::MemoryReportingInfoBase {
  Reporter(std::shared_ptr<Counts> to, int of) : counts(std::move(to)), rank(of) {}

  void reportMemoryUsage(void* data, std::int64_t size, std::size_t /*allocated*/, std::size_t /*reserved*/,
                         c10::Device /*device*/) override {
    counts->report(data, size, rank);
  }
  bool memoryProfilingEnabled() const override { return true; }

  std::shared_ptr<Counts> counts;
  int rank;
};

// Also counts what is allocated while it is there, and is freed or not.
template <class Counts>
struct MeasuringReporter final : Reporter<Counts> {
  using Reporter<Counts>::Reporter;

  void reportMemoryUsage(void* data, std::int64_t size, std::size_t allocated, std::size_t reserved,
                         c10::Device device) override {
    Reporter<Counts>::reportMemoryUsage(data, size, allocated, reserved, device);
    if (size > 0) {
      pieces[data] = size;
      most = std::max(most, now += size);
    } else if (const auto piece = pieces.find(data); piece != pieces.end()) {
      now -= piece->second;
      pieces.erase(piece);
    }
  }

  std::unordered_map<const void*, std::int64_t> pieces;
  std::int64_t now = 0;
  std::int64_t most = 0;
};

// Returns true when PyTorch's profiler has the reports of this thread for itself.
template <class Counts>
bool is_profiled() {
  const auto* const around = c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE);
  return around != nullptr && dynamic_cast<const Reporter<Counts>*>(around) == nullptr;
}

}  // namespace

struct MemoryWatch::Scope::Guard {
  explicit Guard(std::shared_ptr<c10::DebugInfoBase> reporter)
      : guard(c10::DebugInfoKind::PROFILER_STATE, std::move(reporter)) {}
  c10::DebugInfoGuard guard;
};

MemoryWatch::MemoryWatch(int ranks, int stages, int replicas)
    : counts_(std::make_shared<Counts>(ranks, stages, replicas)) {}
MemoryWatch::~MemoryWatch() = default;

MemoryWatch::Scope::Scope(MemoryWatch& watch, int rank, int replica) {
  if (is_profiled<Counts>()) return;
  guard_ =
      std::make_unique<Guard>(std::make_shared<Reporter<Counts>>(watch.counts_, watch.counts_->index(rank, replica)));
}
MemoryWatch::Scope::~Scope() = default;

void MemoryWatch::measure_update(int stage, int rank, int replica, const std::function<void()>& update) {
  if (is_profiled<Counts>()) return update();
  const auto reporter = std::make_shared<MeasuringReporter<Counts>>(counts_, counts_->index(rank, replica));
  {
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, reporter);
    update();
  }
  Counts::raise(counts_->working_update[static_cast<std::size_t>(stage)], reporter->most - reporter->now);
}

void MemoryWatch::adopt(const at::Tensor& tensor, int rank, int replica) {
  const auto bytes = static_cast<std::int64_t>(tensor.storage().nbytes());
  if (bytes > 0) counts_->report(tensor.storage().data(), bytes, counts_->index(rank, replica));
}

int MemoryWatch::replica_here(int rank) {
  struct Place {
    std::weak_ptr<Counts> counts;
    int replica = 0;
  };
  thread_local Place place;
  if (place.counts.lock() != counts_) {
    const auto replicas = static_cast<int>(counts_->ranks.size()) / counts_->ranks_of_replica;
    place = {.counts = counts_, .replica = counts_->ranks[static_cast<std::size_t>(rank)].threads++ % replicas};
  }
  return place.replica;
}

void MemoryWatch::watch(ActionFunctions& functions) {
  // The actions of a rank run on one thread, one after the other.
  thread_local std::optional<Scope> scope;
  thread_local std::int64_t before = 0;
  functions.before = [this](int rank, const Action&) {
    const int replica = replica_here(rank);
    before = now(rank, replica);
    at(rank, replica).most_in_action.store(before, std::memory_order_relaxed);
    // An action that failed has left its own.
    scope.reset();
    scope.emplace(*this, rank, replica);
  };
  functions.after = [this](int rank, const Action& action) {
    scope.reset();
    // An evaluation keeps nothing, and its microbatches may be larger.
    if (!action.is_compute() || !c10::GradMode::is_enabled()) return;
    const auto stage = static_cast<std::size_t>(action.stage);
    const int replica = replica_here(rank);
    const std::int64_t left = now(rank, replica);
    if (action.computation == Computation::Forward) Counts::raise(counts_->kept[stage], left - before);
    const std::int64_t most = at(rank, replica).most_in_action.load(std::memory_order_relaxed);
    const std::int64_t working = most - std::max(before, left);
    if (is_forward(action)) Counts::raise(counts_->working_forward[stage], working);
    if (makes_input_gradient(action)) Counts::lower(counts_->working_backward[stage], working);
  };
}

std::int64_t MemoryWatch::working_forward(int stage) const {
  return counts_->working_forward[static_cast<std::size_t>(stage)].load(std::memory_order_relaxed);
}

std::int64_t MemoryWatch::working_backward(int stage) const {
  const std::int64_t least = counts_->working_backward[static_cast<std::size_t>(stage)].load(std::memory_order_relaxed);
  return least == Counts::kUnknown ? 0 : least;
}

std::int64_t MemoryWatch::working_update(int stage) const {
  return counts_->working_update[static_cast<std::size_t>(stage)].load(std::memory_order_relaxed);
}

std::int64_t MemoryWatch::kept(int stage) const {
  return counts_->kept[static_cast<std::size_t>(stage)].load(std::memory_order_relaxed);
}

std::int64_t MemoryWatch::most(int rank) const {
  std::int64_t most = 0;
  for (auto at = static_cast<std::size_t>(rank); at < counts_->ranks.size();
       at += static_cast<std::size_t>(counts_->ranks_of_replica)) {
    most = std::max(most, counts_->ranks[at].most.load(std::memory_order_relaxed));
  }
  return most;
}

std::int64_t MemoryWatch::now(int rank, int replica) const {
  return at(rank, replica).now.load(std::memory_order_relaxed);
}

MemoryWatch::CountsOfRank& MemoryWatch::at(int rank, int replica) const {
  return counts_->ranks[static_cast<std::size_t>(counts_->index(rank, replica))];
}

}  // namespace penstock::internal
