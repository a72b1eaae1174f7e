// Streams of the stand-in. A stream is a queue and a thread that runs its operations in order, each after a random
// delay, so that programs which lack synchronisation compute wrong results.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>

namespace cuda_standin {

// A point in the work of a stream. Thread-safe.
class Marker {
 public:
  void reach();
  void wait();
  bool is_reached();
  // Returns the time at which it was reached.
  std::chrono::steady_clock::time_point time();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  std::chrono::steady_clock::time_point time_;
};

// Thread-safe. Never destroyed: its thread runs until the process ends.
class Stream {
 public:
  Stream(int device, unsigned long seed) : device_(device), random_(seed) {}
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  int device() const { return device_; }
  void enqueue(std::function<void()> operation);
  // Enqueues a marker that is reached when all earlier operations have completed.
  std::shared_ptr<Marker> mark();
  bool is_idle();

 private:
  void run();

  const int device_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> operations_;
  bool started_ = false;
  bool busy_ = false;
  // Used by the stream's thread only.
  std::mt19937_64 random_;
};

Stream* create_stream(int device);
// Returns the stream of a handle. The handles of default streams stand for that of the current device.
Stream& stream_of(cudaStream_t handle);
// Blocks until all streams of the device are idle.
void synchronize_device(int device);

}  // namespace cuda_standin
