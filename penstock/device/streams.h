// Streams and events of any accelerator of libtorch, through c10's generic interface. A stream is a queue of work that a
// device runs in order; the host appends to it and does not wait. The CPU is the device without streams: its work is
// done when a call returns, so that every function below does nothing for it.
//
//   const RankStreams streams({at::Device("cuda:0")});
//   const StreamPoint before = StreamPoint::now(streams.devices());   // on the caller's thread
//   const RankStreams::Scope scope(streams);                           // on the rank's thread
//   before.block(streams.devices());                                   // the rank's work comes after the caller's
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "penstock/base/deadline.h"

namespace penstock::internal {

// Returns true if the device runs its work in streams: true for accelerators, false for the CPU and for meta tensors.
bool has_streams(at::Device device);

// Returns the device with an index: "cuda" becomes the current CUDA device. Devices without streams stay as they are.
at::Device with_index(at::Device device);

// Returns the stream to which the calling thread appends work for the device. Requires has_streams(device).
c10::Stream current_stream(at::Device device);

// Returns the stream that threads use unless they choose another one. Requires has_streams(device).
c10::Stream default_stream(at::Device device);

// Returns a stream of the device's pool; its default stream if it has no pool. Two streams of a pool may be the same.
c10::Stream stream_of_pool(at::Device device);

// Blocks the host until the device has ended all work of all of its streams.
void synchronize_device(at::Device device);

// Tells the allocator of a tensor's memory that the stream uses it: the memory is not reused before the work that is in
// the stream when the tensor is freed. Call it for a tensor that another stream has allocated. Does nothing for tensors
// without memory on a device with streams. Without a stream, it is the calling thread's current one.
void use_on_stream(const at::Tensor& tensor, const c10::Stream& stream);
void use_on_stream(const at::Tensor& tensor);

// Blocks until the device has reached the event. Returns false at the deadline.
bool wait_for(const c10::Event& event, Deadline deadline);

// A point in the work of streams: everything that was in them when the point was made. Cheap to copy. Any thread may use
// it.
class StreamPoint {
 public:
  // Makes a point that has been reached.
  StreamPoint() = default;
  // Makes a point after all work that is in the stream.
  static StreamPoint after(const c10::Stream& stream);
  // Makes a point after all work in the calling thread's current streams of these devices.
  static StreamPoint now(std::span<const at::Device> devices);
  static StreamPoint now(at::Device device) { return now({&device, 1}); }

  // Makes the point come after another one too.
  void add(const StreamPoint& other);

  // Makes later work of the stream wait for the point. The host does not wait.
  void block(const c10::Stream& stream) const;
  // Does so for the calling thread's current streams of these devices.
  void block(std::span<const at::Device> devices) const;
  void block(at::Device device) const { block({&device, 1}); }

  // Returns true if the devices have reached the point. The host may then read what was written before it.
  bool is_reached() const;
  // Blocks the host until the devices have reached the point. Returns false at the deadline.
  bool wait(Deadline deadline) const;

 private:
  std::vector<std::shared_ptr<const c10::Event>> events_;
};

// The streams in which a rank computes: one for each device of its stages, for the life of the object. Empty for a rank
// that computes on the CPU.
class RankStreams {
 public:
  RankStreams() = default;
  // Takes the devices of the rank's stages, in any order and number.
  explicit RankStreams(const std::vector<at::Device>& devices);

  // Returns the devices with streams, each once.
  const std::vector<at::Device>& devices() const { return devices_; }

  // Returns a point after all work that is in the streams.
  StreamPoint point_after() const;

  // Makes the streams current on the calling thread, until it is destroyed on the same thread, and the first of the
  // devices the current one.
  class Scope {
   public:
    explicit Scope(const RankStreams& streams);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    const RankStreams* outer_;
    std::optional<c10::MultiStreamGuard> streams_;
    std::optional<c10::DeviceGuard> device_;
  };
  // Returns the devices of the calling thread's scope; none outside of one.
  static std::span<const at::Device> devices_of_thread();

 private:
  std::vector<at::Device> devices_;
  std::vector<c10::Stream> streams_;
};

}  // namespace penstock::internal
