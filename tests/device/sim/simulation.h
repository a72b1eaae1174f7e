// The state of the simulation: streams, memory, clocks, counters and races. There is one for each process. It is created
// by install() and never destroyed, as tensors may outlive everything else.
#pragma once

#include <c10/core/Stream.h>

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/device/sim/block_pool.h"
#include "tests/device/sim/dual_mapping.h"
#include "tests/device/sim/sim_device.h"
#include "tests/device/sim/stream_queue.h"
#include "tests/device/sim/vector_clock.h"

namespace penstock::sim {

inline constexpr auto kSim = c10::DeviceType::PrivateUse1;

// Returns the stream that is current on this thread. Index −1 is the current device.
c10::Stream current_stream(c10::DeviceIndex device);
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex device);
// Makes the stream current on this thread, and returns the previous one of its device.
c10::Stream exchange_stream(c10::Stream stream);

// Thread-safe: every function acquires the lock, and none calls operators.
class Simulation {
 public:
  explicit Simulation(const Options& options);
  // Returns the simulation. Throws if install() was not called.
  static Simulation& get();

  const Options& options() const { return options_; }
  const DualMapping& device_memory() const { return device_memory_; }
  const DualMapping& pinned_memory() const { return pinned_memory_; }
  bool is_pinned(const void* pointer) const { return pinned_memory_.contains(pointer); }
  // Returns the address that a kernel uses for a tensor's address. Other host memory has one address.
  void* kernel_address(const void* pointer) const;

  // Streams and events.
  // Takes the pool's streams in turn. Those of high priority have a pool of their own.
  c10::Stream stream_from_pool(c10::DeviceIndex device, bool has_high_priority);
  void launch(const c10::Stream& stream, const char* name, const std::vector<Use>& uses, std::function<void()> kernel);
  std::shared_ptr<EventPoint> record(const c10::Stream& stream);
  void block(const c10::Stream& stream, const std::shared_ptr<EventPoint>& point);
  // Blocks the host, which counts, and orders what follows on the host after the point.
  void wait(const std::shared_ptr<EventPoint>& point);
  void wait(const c10::Stream& stream) { wait(record(stream)); }
  void wait_for_device(c10::DeviceIndex device);
  // Blocks the host without telling the detector: an accelerator would not wait here.
  void wait_unnoticed(const c10::Stream& stream);
  // Returns true if the point or the stream's work has been passed, which then orders what follows on the host.
  bool query(const std::shared_ptr<EventPoint>& point);
  bool query(const c10::Stream& stream);

  // Memory.
  Block* allocate(c10::DeviceIndex device, c10::StreamId stream, std::size_t bytes);
  // Releases the block that begins at this address.
  void release(const void* pointer);
  void record_stream(const void* pointer, const c10::Stream& stream);
  // Returns cached memory of a device, or cached pinned memory, to the system.
  void empty_cache(c10::DeviceIndex device);
  c10::DeviceIndex device_of(const void* pointer);
  // Calls `change` with the statistics of a device.
  void with_statistics(c10::DeviceIndex device,
                       const std::function<void(c10::CachingDeviceAllocator::DeviceStats&)>& change);

  // Counters and races.
  void count_kernel();
  void count_copy();
  void count_simulation_wait(const std::string& operation);
  void note_without_meta(const std::string& operation);
  Counters counters();
  std::vector<std::string> take_races();
  std::vector<std::string> simulation_waits();
  std::vector<std::string> operators_without_meta();
  void trace_host_waits(bool enabled);
  std::vector<std::string> take_host_wait_traces();
  void set_throw_races(bool enabled);

  // Ends the threads of all streams. Returns false if one is still busy after a few seconds.
  bool stop();

 private:
  StreamQueue& queue_of(const c10::Stream& stream);
  void tick(StreamQueue& queue);
  std::shared_ptr<EventPoint> record_locked(StreamQueue& queue);
  // Keeps or prints a stack trace, if asked for.
  void trace_host_wait();
  // Merges the clock of what the host has waited for.
  void host_has_waited(const VectorClock& clock);
  void protect(Block& block);
  // Records an access, and returns a message if it is a race.
  std::string access(StreamQueue& queue, const char* operation, const at::Tensor& tensor, bool writes);
  std::string text_of(const Access& access, const Block& block) const;
  void drain(c10::DeviceIndex device);

  Options options_;
  std::mutex mutex_;
  DualMapping device_memory_;
  DualMapping pinned_memory_;
  BlockPool blocks_;
  // Pinned blocks with restricted pages.
  std::set<Block*> protected_blocks_;
  std::map<std::pair<c10::DeviceIndex, c10::StreamId>, StreamQueue*> queues_by_id_;
  std::vector<std::unique_ptr<StreamQueue>> queues_;
  // Number of streams taken from the pools of each device, of normal and of high priority.
  std::vector<std::array<int, 2>> taken_from_pool_;
  // Everything that any thread of the host has waited for. Order between the threads of the host is not tracked.
  VectorClock host_;
  bool tracing_ = false;
  Counters counters_;
  std::vector<std::string> races_;
  std::vector<std::string> traces_;
  std::set<std::string> simulation_waits_;
  std::set<std::string> without_meta_;
};

// Creates the simulation, once.
void create_simulation(const Options& options);

}  // namespace penstock::sim
