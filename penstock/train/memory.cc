#include "penstock/train/memory.h"

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <optional>
#include <unordered_map>

namespace penstock {

// By replica and rank, and whose each piece of memory is. Pieces lie in several maps, so that ranks seldom meet at one.
struct MemoryWatch::Counts {
  struct Rank {
    std::atomic<std::int64_t> now = 0;
    std::atomic<std::int64_t> most = 0;
    // Of the first replica alone: threads that have asked which replica they work for.
    std::atomic<int> threads = 0;
  };
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
        ranks_of_replica(of_ranks) {}

  int index(int rank, int replica) const { return rank < 0 ? -1 : replica * ranks_of_replica + rank; }

  void add(int rank, std::int64_t size) {
    Rank& one = ranks[static_cast<std::size_t>(rank)];
    const std::int64_t now = one.now.fetch_add(size, std::memory_order_relaxed) + size;
    std::int64_t most = one.most.load(std::memory_order_relaxed);
    while (now > most && !one.most.compare_exchange_weak(most, now, std::memory_order_relaxed)) {
    }
  }

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

  std::vector<Rank> ranks;
  // By stage.
  std::vector<std::atomic<std::int64_t>> kept;
  std::array<Map, 16> maps;
  int ranks_of_replica;
};

namespace {

// Of a thread, for libtorch's allocator to report to.
template <class Counts>
struct Reporter final : c10::MemoryReportingInfoBase {
  Reporter(std::shared_ptr<Counts> to, int of) : counts(std::move(to)), rank(of) {}

  void reportMemoryUsage(void* data, std::int64_t size, std::size_t /*allocated*/, std::size_t /*reserved*/,
                         c10::Device /*device*/) override {
    counts->report(data, size, rank);
  }
  bool memoryProfilingEnabled() const override { return true; }

  std::shared_ptr<Counts> counts;
  int rank;
};

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
  // PyTorch's profiler has it for itself.
  const auto* const around = c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE);
  if (around != nullptr && dynamic_cast<const Reporter<Counts>*>(around) == nullptr) return;
  guard_ =
      std::make_unique<Guard>(std::make_shared<Reporter<Counts>>(watch.counts_, watch.counts_->index(rank, replica)));
}
MemoryWatch::Scope::~Scope() = default;

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
    // An action that failed has left its own.
    scope.reset();
    scope.emplace(*this, rank, replica);
  };
  functions.after = [this](int rank, const Action& action) {
    scope.reset();
    if (action.computation != Computation::Forward) return;
    std::atomic<std::int64_t>& kept = counts_->kept[static_cast<std::size_t>(action.stage)];
    const std::int64_t now_kept = now(rank, replica_here(rank)) - before;
    std::int64_t known = kept.load(std::memory_order_relaxed);
    while (now_kept > known && !kept.compare_exchange_weak(known, now_kept, std::memory_order_relaxed)) {
    }
  };
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
  return counts_->ranks[static_cast<std::size_t>(counts_->index(rank, replica))].now.load(std::memory_order_relaxed);
}

}  // namespace penstock
