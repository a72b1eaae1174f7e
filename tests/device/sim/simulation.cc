#include "tests/device/sim/simulation.h"

#include <c10/util/Backtrace.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <array>
#include <chrono>
#include <cstdio>

namespace penstock::sim {
namespace {

// Number of streams of each priority, as on CUDA.
constexpr int kPoolStreams = 32;
// Time that stream threads have at exit for the kernel that they are busy with.
constexpr auto kStopTime = std::chrono::seconds(5);

Simulation* simulation = nullptr;

thread_local c10::DeviceIndex thread_device = 0;
thread_local std::map<c10::DeviceIndex, c10::StreamId> thread_streams;

}  // namespace

c10::DeviceIndex current_device() {
  return thread_device;
}
void set_current_device(c10::DeviceIndex device) {
  thread_device = device;
}

c10::Stream current_stream(c10::DeviceIndex device) {
  if (device < 0) device = thread_device;
  const auto found = thread_streams.find(device);
  const c10::StreamId id = found == thread_streams.end() ? 0 : found->second;
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, device), id);
}

c10::Stream exchange_stream(c10::Stream stream) {
  const c10::Stream previous = current_stream(stream.device_index());
  thread_streams[stream.device_index()] = stream.id();
  return previous;
}

void create_simulation(const Options& options) {
  TORCH_CHECK(simulation == nullptr, "sim: install() was called before");
  simulation = new Simulation(options);
}

Simulation& Simulation::get() {
  TORCH_CHECK(simulation != nullptr, "sim: the device is not installed.\n  Hint: call penstock::sim::install first.");
  return *simulation;
}

bool is_installed() {
  return simulation != nullptr;
}

Simulation::Simulation(const Options& options)
    : options_(options),
      device_memory_("sim_device", options.device_bytes * static_cast<std::size_t>(options.devices), PROT_NONE),
      pinned_memory_("sim_pinned", options.device_bytes, PROT_READ | PROT_WRITE),
      blocks_(device_memory_, pinned_memory_, options.devices, options.device_bytes),
      taken_from_pool_(static_cast<std::size_t>(options.devices)) {
  max_delay_us = options.max_delay_us;
}

void* Simulation::kernel_address(const void* pointer) const {
  if (device_memory_.contains(pointer)) return device_memory_.kernel_address(pointer);
  if (pinned_memory_.contains(pointer)) return pinned_memory_.kernel_address(pointer);
  return const_cast<void*>(pointer);
}

StreamQueue& Simulation::queue_of(const c10::Stream& stream) {
  TORCH_CHECK(stream.device_type() == kSim && stream.device_index() >= 0 && stream.device_index() < options_.devices,
              "sim: ", stream, " is not a stream of this device");
  StreamQueue*& queue = queues_by_id_[{stream.device_index(), stream.id()}];
  if (queue == nullptr) {
    const int index = static_cast<int>(queues_.size());
    queues_.push_back(std::make_unique<StreamQueue>(index, stream, options_.seed * 7919 + queues_.size()));
    queue = queues_.back().get();
  }
  return *queue;
}

c10::Stream Simulation::stream_from_pool(c10::DeviceIndex device, bool has_high_priority) {
  const std::lock_guard lock(mutex_);
  if (device < 0) device = thread_device;
  const std::size_t pool = has_high_priority ? 1 : 0;
  const int taken = taken_from_pool_.at(static_cast<std::size_t>(device)).at(pool)++;
  const int id = 1 + static_cast<int>(pool) * kPoolStreams + taken % kPoolStreams;
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, device), id);
}

void Simulation::tick(StreamQueue& queue) {
  // Work is launched after all that the host has waited for.
  queue.clock.merge(host_);
  queue.clock.advance(queue.index());
}

void Simulation::launch(const c10::Stream& stream, const char* name, const std::vector<Use>& uses,
                        std::function<void()> kernel) {
  const std::lock_guard lock(mutex_);
  StreamQueue& queue = queue_of(stream);
  tick(queue);
  std::string race;
  // Reads come first, so that an operator does not race with its own writes.
  for (const bool writes : {false, true}) {
    for (const Use& use : uses) {
      if (use.writes != writes || use.tensor == nullptr) continue;
      if (std::string found = access(queue, name, *use.tensor, writes); !found.empty()) race = std::move(found);
    }
  }
  queue.push(name, std::move(kernel));
  TORCH_CHECK(race.empty() || !options_.throw_races, race);
}

std::shared_ptr<EventPoint> Simulation::record_locked(StreamQueue& queue) {
  tick(queue);
  auto point = std::make_shared<EventPoint>(queue.clock);
  queue.push(point);
  return point;
}

std::shared_ptr<EventPoint> Simulation::record(const c10::Stream& stream) {
  const std::lock_guard lock(mutex_);
  return record_locked(queue_of(stream));
}

void Simulation::block(const c10::Stream& stream, const std::shared_ptr<EventPoint>& point) {
  const std::lock_guard lock(mutex_);
  StreamQueue& queue = queue_of(stream);
  tick(queue);
  queue.clock.merge(point->clock());
  queue.push("wait for an event", [point] { point->wait(); });
}

void Simulation::trace_host_wait() {
  const std::lock_guard lock(mutex_);
  if (!tracing_ && !options_.print_host_waits) return;
  std::string trace = c10::get_backtrace(/*frames_to_skip=*/2, /*maximum_number_of_frames=*/60);
  if (options_.print_host_waits) std::fprintf(stderr, "sim: the host waits\n%s\n", trace.c_str());
  if (tracing_) traces_.push_back(std::move(trace));
}

void Simulation::wait(const std::shared_ptr<EventPoint>& point) {
  trace_host_wait();
  point->wait();
  const std::lock_guard lock(mutex_);
  ++counters_.host_waits;
  host_has_waited(point->clock());
}

void Simulation::wait_for_device(c10::DeviceIndex device) {
  trace_host_wait();
  drain(device);
  const std::lock_guard lock(mutex_);
  ++counters_.host_waits;
}

void Simulation::wait_unnoticed(const c10::Stream& stream) {
  record(stream)->wait();
}

bool Simulation::query(const std::shared_ptr<EventPoint>& point) {
  if (!point->is_passed()) return false;
  const std::lock_guard lock(mutex_);
  host_has_waited(point->clock());
  return true;
}

bool Simulation::query(const c10::Stream& stream) {
  const std::lock_guard lock(mutex_);
  StreamQueue& queue = queue_of(stream);
  if (!queue.is_idle()) return false;
  host_has_waited(queue.clock);
  return true;
}

Block* Simulation::allocate(c10::DeviceIndex device, c10::StreamId stream, std::size_t bytes) {
  for (const bool drained : {false, true}) {
    if (drained) drain(device);
    const std::lock_guard lock(mutex_);
    if (drained) blocks_.return_cached_memory(device);
    if (Block* block = blocks_.allocate(device, stream, bytes)) return block;
  }
  const std::string place = device == kPinned ? "pinned memory" : "device " + std::to_string(device);
  const std::lock_guard lock(mutex_);
  TORCH_CHECK_WITH(OutOfMemoryError, false, "sim: out of memory: ", bytes, " bytes do not fit into ", place, ", where ",
                   blocks_.statistics(device).allocated_bytes[0].current, " of ", options_.device_bytes,
                   " bytes are allocated");
}

// Waits for a device, or for all of them if pinned memory is concerned. CUDA does so to return memory.
void Simulation::drain(c10::DeviceIndex device) {
  std::vector<std::shared_ptr<EventPoint>> points;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& queue : queues_) {
      if (device == kPinned || queue->stream().device_index() == device) points.push_back(record_locked(*queue));
    }
  }
  for (const auto& point : points) point->wait();
  const std::lock_guard lock(mutex_);
  for (const auto& point : points) host_has_waited(point->clock());
}

void Simulation::release(const void* pointer) {
  const std::lock_guard lock(mutex_);
  Block* const block = blocks_.find(pointer);
  std::set<int> streams = block->recorded_streams;
  // Copies in flight keep pinned memory, as CUDA's allocator does.
  if (block->device == kPinned) {
    for (const Access& access : block->accesses) {
      if (!host_.covers(access.stream, access.time)) streams.insert(access.stream);
    }
  }
  for (const int stream : streams) block->pending.push_back(record_locked(*queues_[static_cast<std::size_t>(stream)]));
  protected_blocks_.erase(block);
  blocks_.release(block);
}

void Simulation::record_stream(const void* pointer, const c10::Stream& stream) {
  const std::lock_guard lock(mutex_);
  Block* const block = blocks_.find(pointer);
  if (block == nullptr) return;
  if (stream.id() == block->stream && stream.device_index() == block->device) return;
  block->recorded_streams.insert(queue_of(stream).index());
}

void Simulation::empty_cache(c10::DeviceIndex device) {
  drain(device);
  const std::lock_guard lock(mutex_);
  blocks_.return_cached_memory(device);
}

c10::DeviceIndex Simulation::device_of(const void* pointer) {
  const std::lock_guard lock(mutex_);
  const Block* const block = blocks_.find(pointer);
  TORCH_CHECK(block != nullptr && block->device != kPinned, "sim: ", pointer, " is not device memory");
  return block->device;
}

void Simulation::with_statistics(c10::DeviceIndex device,
                                 const std::function<void(c10::CachingDeviceAllocator::DeviceStats&)>& change) {
  const std::lock_guard lock(mutex_);
  change(blocks_.statistics(device));
}

void Simulation::count_kernel() {
  const std::lock_guard lock(mutex_);
  ++counters_.kernels;
}

void Simulation::count_copy() {
  const std::lock_guard lock(mutex_);
  ++counters_.copies;
}

void Simulation::count_simulation_wait(const std::string& operation) {
  const std::lock_guard lock(mutex_);
  ++counters_.simulation_waits;
  simulation_waits_.insert(operation);
}

void Simulation::note_without_meta(const std::string& operation) {
  const std::lock_guard lock(mutex_);
  without_meta_.insert(operation);
}

Counters Simulation::counters() {
  const std::lock_guard lock(mutex_);
  return counters_;
}

std::vector<std::string> Simulation::take_races() {
  const std::lock_guard lock(mutex_);
  return std::exchange(races_, {});
}

std::vector<std::string> Simulation::simulation_waits() {
  const std::lock_guard lock(mutex_);
  return {simulation_waits_.begin(), simulation_waits_.end()};
}

std::vector<std::string> Simulation::operators_without_meta() {
  const std::lock_guard lock(mutex_);
  return {without_meta_.begin(), without_meta_.end()};
}

void Simulation::trace_host_waits(bool enabled) {
  const std::lock_guard lock(mutex_);
  tracing_ = enabled;
}

std::vector<std::string> Simulation::take_host_wait_traces() {
  const std::lock_guard lock(mutex_);
  return std::exchange(traces_, {});
}

void Simulation::set_throw_races(bool enabled) {
  const std::lock_guard lock(mutex_);
  options_.throw_races = enabled;
}

bool Simulation::stop() {
  std::vector<StreamQueue*> queues;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& queue : queues_) queues.push_back(queue.get());
  }
  // Any of them may wait for an event of another.
  for (StreamQueue* queue : queues) queue->request_stop();
  const Time deadline = std::chrono::steady_clock::now() + kStopTime;
  bool stopped = true;
  for (StreamQueue* queue : queues) stopped = queue->join_until(deadline) && stopped;
  return stopped;
}

}  // namespace penstock::sim
