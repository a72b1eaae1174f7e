#include "penstock/train/memory_watch.h"

#include <c10/core/Allocator.h>
#include <c10/core/GradMode.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <map>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "penstock/base/mutex.h"
#include "penstock/device/memory_stats.h"
#include "penstock/device/streams.h"
#include "penstock/tensor/nested.h"

namespace penstock::internal {

struct MemoryWatch::RankCounts {
  std::atomic<std::int64_t> current = 0;
  std::atomic<std::int64_t> peak = 0;
  std::atomic<std::int64_t> peak_in_action = 0;
  // Bytes after each action of a batch, and at most during it. Only the thread of the rank adds to it.
  std::vector<std::pair<std::int64_t, std::int64_t>> actions;
  // Number of threads that have been assigned to a replica. Used in the counts of the first replica only.
  std::atomic<int> threads = 0;
  // Set for a rank on a device.
  DevicePeak* device = nullptr;
};

// Peak of a device since the watch began, and of the actions of the ranks that share it. The allocator's own peak begins
// anew with each action of any of them.
class MemoryWatch::DevicePeak {
 public:
  explicit DevicePeak(at::Device device) : device_(device) {}

  at::Device device() const { return device_; }
  // Begins an action of a rank.
  void begin(const RankCounts& rank) {
    const MutexLock lock(mutex_);
    observe();
    peaks_[&rank] = 0;
  }
  // Ends it. Returns the memory of the device, with its peak during the action.
  DeviceMemory end(const RankCounts& rank) {
    const MutexLock lock(mutex_);
    DeviceMemory memory = observe();
    memory.peak = peaks_[&rank];
    peaks_.erase(&rank);
    return memory;
  }
  std::int64_t peak_so_far() {
    const MutexLock lock(mutex_);
    observe();
    return peak_;
  }

 private:
  // Takes the peak since the last call, which belongs to all actions that run.
  DeviceMemory observe() PENSTOCK_REQUIRES(mutex_) {
    const DeviceMemory memory = device_memory(device_);
    reset_peak_memory(device_);
    peak_ = std::max(peak_, memory.peak);
    for (auto& [rank, peak] : peaks_) peak = std::max(peak, memory.peak);
    return memory;
  }

  const at::Device device_;
  Mutex mutex_;
  std::int64_t peak_ PENSTOCK_GUARDED_BY(mutex_) = 0;
  // Peaks of the actions that run, by rank.
  std::map<const RankCounts*, std::int64_t> peaks_ PENSTOCK_GUARDED_BY(mutex_);
};

// Counts of all ranks, and the owner of each allocation.
struct MemoryWatch::Counts {
  struct Allocation {
    // Index into `ranks`.
    int rank = 0;
    std::int64_t size = 0;
  };
  // One of several maps that share the address space, so that ranks rarely contend for a mutex. A thread holds at most
  // one of these mutexes, and acquires no other lock under it.
  struct Map {
    Mutex mutex;
    std::unordered_map<const void*, Allocation> allocations PENSTOCK_GUARDED_BY(mutex);
  };

  Counts(int rank_count, int stage_count, int replica_count)
      : ranks(static_cast<std::size_t>(rank_count) * static_cast<std::size_t>(replica_count)),
        saved_activations(static_cast<std::size_t>(stage_count)),
        weight_inputs(static_cast<std::size_t>(stage_count)),
        recomputation_inputs(static_cast<std::size_t>(stage_count)),
        forward_workspace(static_cast<std::size_t>(stage_count)),
        backward_workspace(static_cast<std::size_t>(stage_count)),
        weight_workspace(static_cast<std::size_t>(stage_count)),
        update_workspace(static_cast<std::size_t>(stage_count)),
        ranks_per_replica(rank_count) {
    for (auto* const workspaces : {&backward_workspace, &weight_workspace}) {
      for (auto& workspace : *workspaces) workspace = kUnknown;
    }
  }

  int index(int rank, int replica) const { return rank < 0 ? -1 : replica * ranks_per_replica + rank; }

  void add(int rank, std::int64_t size) {
    RankCounts& counts = ranks[static_cast<std::size_t>(rank)];
    const std::int64_t current = counts.current.fetch_add(size, std::memory_order_relaxed) + size;
    raise(counts.peak, current);
    raise(counts.peak_in_action, current);
  }

  static void raise(std::atomic<std::int64_t>& maximum, std::int64_t value) {
    std::int64_t known = maximum.load(std::memory_order_relaxed);
    while (value > known && !maximum.compare_exchange_weak(known, value, std::memory_order_relaxed)) {
    }
  }
  static void lower(std::atomic<std::int64_t>& minimum, std::int64_t value) {
    std::int64_t known = minimum.load(std::memory_order_relaxed);
    while (value < known && !minimum.compare_exchange_weak(known, value, std::memory_order_relaxed)) {
    }
  }
  static constexpr std::int64_t kUnknown = std::numeric_limits<std::int64_t>::max();

  // Records an allocation, or for a size that is not positive the release of one.
  void report(const void* data, std::int64_t size, int rank) {
    Map& map = maps[(reinterpret_cast<std::uintptr_t>(data) >> 8U) % maps.size()];
    std::optional<Allocation> freed;
    {
      const MutexLock lock(map.mutex);
      // An earlier allocation at this address has been freed, even if that happened outside of any scope.
      if (const auto found = map.allocations.find(data); found != map.allocations.end()) {
        freed = found->second;
        map.allocations.erase(found);
      }
      if (size > 0 && rank >= 0) map.allocations.emplace(data, Allocation{.rank = rank, .size = size});
    }
    if (freed) add(freed->rank, -freed->size);
    if (size > 0 && rank >= 0) add(rank, size);
  }

  // Indexed by replica and rank.
  std::vector<RankCounts> ranks;
  // Indexed by stage.
  std::vector<std::atomic<std::int64_t>> saved_activations;
  std::vector<std::atomic<std::int64_t>> weight_inputs;
  std::vector<std::atomic<std::int64_t>> recomputation_inputs;
  std::atomic<std::int64_t> loss_bytes = 0;
  std::vector<std::atomic<std::int64_t>> forward_workspace;
  // The first is that of a whole backward or its input half, the second that of its weight half.
  std::vector<std::atomic<std::int64_t>> backward_workspace;
  std::vector<std::atomic<std::int64_t>> weight_workspace;
  std::vector<std::atomic<std::int64_t>> update_workspace;
  std::array<Map, 16> maps;
  int ranks_per_replica;
  std::vector<std::unique_ptr<DevicePeak>> devices;
};

namespace {

// Receives the reports of libtorch's allocator on one thread.
template <class Counts>
struct Reporter : c10::MemoryReportingInfoBase {
  Reporter(std::shared_ptr<Counts> to, int of) : counts(std::move(to)), rank(of) {}

  void reportMemoryUsage(void* data, std::int64_t size, std::size_t /*allocated*/, std::size_t /*reserved*/,
                         c10::Device /*device*/) override {
    counts->report(data, size, rank);
  }
  bool memoryProfilingEnabled() const override { return true; }

  // Returns the reporter of this thread; null if there is none.
  static const Reporter* current() {
    return dynamic_cast<const Reporter*>(c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE));
  }

  std::shared_ptr<Counts> counts;
  int rank;
};

// Measures in addition the allocations that are made while it is installed.
template <class Counts>
struct MeasuringReporter final : Reporter<Counts> {
  using Reporter<Counts>::Reporter;

  void reportMemoryUsage(void* data, std::int64_t size, std::size_t allocated, std::size_t reserved,
                         c10::Device device) override {
    Reporter<Counts>::reportMemoryUsage(data, size, allocated, reserved, device);
    if (size > 0) {
      sizes[data] = size;
      peak = std::max(peak, current += size);
    } else if (const auto found = sizes.find(data); found != sizes.end()) {
      current -= found->second;
      sizes.erase(found);
    }
  }

  std::unordered_map<const void*, std::int64_t> sizes;
  std::int64_t current = 0;
  std::int64_t peak = 0;
};

// Returns true when PyTorch's profiler receives the reports of this thread.
template <class Counts>
bool is_profiled() {
  const auto* const installed = c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE);
  return installed != nullptr && Reporter<Counts>::current() == nullptr;
}

}  // namespace

struct MemoryWatch::Scope::Guard {
  explicit Guard(std::shared_ptr<c10::DebugInfoBase> reporter)
      : guard(c10::DebugInfoKind::PROFILER_STATE, std::move(reporter)) {}
  c10::DebugInfoGuard guard;
};

MemoryWatch::MemoryWatch(const Schedule& schedule, int replicas)
    : counts_(std::make_shared<Counts>(schedule.ranks(), schedule.stages(), replicas)) {
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    recomputed_.merge(recomputed_microbatches(schedule, rank));
  }
}
MemoryWatch::~MemoryWatch() = default;

void MemoryWatch::set_device(int rank, int replica, at::Device device) {
  if (!has_streams(device)) return;
  auto& devices = counts_->devices;
  auto found = std::ranges::find_if(devices, [&](const auto& known) { return known->device() == device; });
  if (found == devices.end()) found = devices.insert(found, std::make_unique<DevicePeak>(device));
  counts_of(rank, replica).device = found->get();
}

bool MemoryWatch::has_devices() const {
  return !counts_->devices.empty();
}

MemoryWatch::Scope::Scope(MemoryWatch& watch, int rank, int replica) {
  if (is_profiled<Counts>()) return;
  guard_ =
      std::make_unique<Guard>(std::make_shared<Reporter<Counts>>(watch.counts_, watch.counts_->index(rank, replica)));
}
MemoryWatch::Scope::~Scope() = default;

void MemoryWatch::measure_update(int stage, int rank, int replica, const std::function<void()>& update) {
  if (is_profiled<Counts>() || counts_of(rank, replica).device != nullptr) return update();
  const auto reporter = std::make_shared<MeasuringReporter<Counts>>(counts_, counts_->index(rank, replica));
  {
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, reporter);
    update();
  }
  Counts::raise(counts_->update_workspace[static_cast<std::size_t>(stage)], reporter->peak - reporter->current);
}

at::Tensor MemoryWatch::measure_loss(const c10::IValue& output, const std::function<at::Tensor()>& loss) {
  const Reporter<Counts>* const outer = Reporter<Counts>::current();
  if (outer == nullptr || !c10::GradMode::is_enabled()) return loss();
  const std::vector<at::Tensor> outputs = extract_tensor_args(output);
  // A graph that saves a tensor refers to it, or to its storage.
  const auto references = [](const at::Tensor& tensor) {
    return tensor.use_count() + (tensor.has_storage() ? tensor.storage().use_count() : 0);
  };
  std::vector<std::size_t> before;
  for (const at::Tensor& tensor : outputs) before.push_back(tensor.defined() ? references(tensor) : 0);
  const auto reporter = std::make_shared<MeasuringReporter<Counts>>(counts_, outer->rank);
  at::Tensor result;
  {
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, reporter);
    result = loss();
  }
  std::int64_t kept = reporter->current;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i].defined() || references(outputs[i]) <= before[i] || !outputs[i].has_storage()) continue;
    kept += static_cast<std::int64_t>(outputs[i].nbytes());
  }
  Counts::raise(counts_->loss_bytes, kept);
  return result;
}

void MemoryWatch::adopt(const at::Tensor& tensor, int rank, int replica) {
  const auto bytes = static_cast<std::int64_t>(tensor.storage().nbytes());
  if (bytes > 0) counts_->report(tensor.storage().data(), bytes, counts_->index(rank, replica));
}

int MemoryWatch::replica_of_thread(int rank) {
  struct Assignment {
    std::weak_ptr<Counts> counts;
    int replica = 0;
  };
  thread_local Assignment assignment;
  if (assignment.counts.lock() != counts_) {
    const auto replicas = static_cast<int>(counts_->ranks.size()) / counts_->ranks_per_replica;
    assignment = {.counts = counts_, .replica = counts_->ranks[static_cast<std::size_t>(rank)].threads++ % replicas};
  }
  return assignment.replica;
}

void MemoryWatch::watch(ActionFunctions& functions) {
  // Each rank runs its actions on one thread, one after the other.
  thread_local std::optional<Scope> scope;
  thread_local std::int64_t before = 0;
  functions.before = [this](int rank, const Action&) {
    const int replica = replica_of_thread(rank);
    if (DevicePeak* const device = counts_of(rank, replica).device) {
      device->begin(counts_of(rank, replica));
      return;
    }
    before = current(rank, replica);
    counts_of(rank, replica).peak_in_action.store(before, std::memory_order_relaxed);
    // An action that failed has not reset its scope.
    scope.reset();
    scope.emplace(*this, rank, replica);
  };
  functions.after = [this](int rank, const Action& action) {
    scope.reset();
    // An evaluation saves no activations, and its microbatches may be larger.
    if (!c10::GradMode::is_enabled()) return;
    const int replica = replica_of_thread(rank);
    RankCounts& counts = counts_of(rank, replica);
    if (counts.device != nullptr) {
      const DeviceMemory memory = counts.device->end(counts);
      counts.actions.emplace_back(memory.allocated, memory.peak);
      return;
    }
    const std::int64_t after = current(rank, replica);
    const std::int64_t peak = counts.peak_in_action.load(std::memory_order_relaxed);
    counts.actions.emplace_back(is_profiled<Counts>() ? std::pair<std::int64_t, std::int64_t>()
                                                      : std::pair{after, peak});
    if (!action.is_compute()) return;
    const auto stage = static_cast<std::size_t>(action.stage);
    const bool is_recomputed = recomputed_.contains({action.stage, action.microbatch});
    const std::int64_t more = after - before;
    if (is_forward(action)) {
      Counts::raise((is_recomputed ? counts_->recomputation_inputs : counts_->saved_activations)[stage], more);
    } else if (action.computation == Computation::Recompute) {
      Counts::raise(counts_->saved_activations[stage], recomputation_inputs(action.stage) + more);
    } else if (action.computation == Computation::InputBackward) {
      // The gradient that is sent on was allocated too.
      Counts::raise(counts_->weight_inputs[stage], saved_activations(action.stage) + more);
    }
    const std::int64_t workspace = peak - std::max(before, after);
    // A forward that saves its inputs frees the rest before it ends, which its recomputation does not.
    const bool saves_activations = is_forward(action) ? !is_recomputed : action.computation == Computation::Recompute;
    if (saves_activations) Counts::raise(counts_->forward_workspace[stage], workspace);
    if (makes_input_gradient(action)) {
      Counts::lower(counts_->backward_workspace[stage], workspace);
    } else if (makes_weight_gradient(action)) {
      Counts::lower(counts_->weight_workspace[stage], workspace);
    }
  };
}

void MemoryWatch::begin_batch() {
  for (RankCounts& counts : counts_->ranks) counts.actions.clear();
}

void MemoryWatch::add_to(Record& record) const {
  for (std::size_t rank = 0; rank < record.size(); ++rank) {
    const auto& actions = counts_of(static_cast<int>(rank), 0).actions;
    for (std::size_t i = 0; i < std::min(actions.size(), record[rank].size()); ++i) {
      std::tie(record[rank][i].allocated, record[rank][i].peak_allocated) = actions[i];
    }
  }
}

std::int64_t MemoryWatch::forward_workspace(int stage) const {
  return counts_->forward_workspace[static_cast<std::size_t>(stage)].load(std::memory_order_relaxed);
}

std::int64_t MemoryWatch::backward_workspace(int stage) const {
  const auto known = [&](const std::vector<std::atomic<std::int64_t>>& workspaces) {
    const std::int64_t minimum = workspaces[static_cast<std::size_t>(stage)].load(std::memory_order_relaxed);
    return minimum == Counts::kUnknown ? 0 : minimum;
  };
  return std::max(known(counts_->backward_workspace), known(counts_->weight_workspace));
}

std::int64_t MemoryWatch::update_workspace(int stage) const {
  return counts_->update_workspace[static_cast<std::size_t>(stage)].load(std::memory_order_relaxed);
}

std::int64_t MemoryWatch::saved_activations(int stage) const {
  return counts_->saved_activations[static_cast<std::size_t>(stage)].load(std::memory_order_relaxed);
}

std::int64_t MemoryWatch::weight_inputs(int stage) const {
  return counts_->weight_inputs[static_cast<std::size_t>(stage)].load(std::memory_order_relaxed);
}

std::int64_t MemoryWatch::recomputation_inputs(int stage) const {
  return counts_->recomputation_inputs[static_cast<std::size_t>(stage)].load(std::memory_order_relaxed);
}

std::int64_t MemoryWatch::loss_bytes() const {
  return counts_->loss_bytes.load(std::memory_order_relaxed);
}

std::int64_t MemoryWatch::peak(int rank) const {
  std::int64_t peak = 0;
  for (auto index = static_cast<std::size_t>(rank); index < counts_->ranks.size();
       index += static_cast<std::size_t>(counts_->ranks_per_replica)) {
    DevicePeak* const device = counts_->ranks[index].device;
    peak = std::max(
        peak, device != nullptr ? device->peak_so_far() : counts_->ranks[index].peak.load(std::memory_order_relaxed));
  }
  return peak;
}

std::int64_t MemoryWatch::current(int rank, int replica) const {
  return counts_of(rank, replica).current.load(std::memory_order_relaxed);
}

MemoryWatch::RankCounts& MemoryWatch::counts_of(int rank, int replica) const {
  return counts_->ranks[static_cast<std::size_t>(counts_->index(rank, replica))];
}

}  // namespace penstock::internal
