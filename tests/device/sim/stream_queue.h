// Streams and events. A stream is a queue of work with a thread that executes it in order, after random delays.
#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

#include "tests/device/sim/vector_clock.h"

namespace penstock::sim {

using Time = std::chrono::steady_clock::time_point;

// One recording of an event: a point in a stream's work.
class EventPoint {
 public:
  explicit EventPoint(VectorClock clock) : clock_(std::move(clock)) {}

  // Returns what is complete once the stream has passed the point.
  const VectorClock& clock() const { return clock_; }
  // Called by the stream's thread.
  void pass();
  void wait();
  // Returns false if the point was not passed until then.
  bool wait_until(Time deadline);
  bool is_passed();
  // Returns when the stream passed the point. All devices share one clock.
  Time time();

 private:
  const VectorClock clock_;
  std::mutex mutex_;
  std::condition_variable passed_condition_;
  bool passed_ = false;
  Time time_;
};

// Longest delay of all streams, in microseconds.
extern std::atomic<int> max_delay_us;

class StreamQueue {
 public:
  // `index` counts the streams of all devices. Starts the thread.
  StreamQueue(int index, c10::Stream stream, std::uint64_t seed);
  StreamQueue(const StreamQueue&) = delete;
  StreamQueue& operator=(const StreamQueue&) = delete;

  int index() const { return index_; }
  const c10::Stream& stream() const { return stream_; }

  // Enqueues a kernel, which runs with one intra-op thread. Ends the process if it throws.
  void push(const char* name, std::function<void()> kernel);
  void push(std::shared_ptr<EventPoint> point);
  // Returns true if all work is done.
  bool is_idle();
  // Discards pending work, and work that comes later. Events among it count as passed. The thread ends after the work
  // that it is busy with.
  void request_stop();
  // Joins the thread after request_stop(). Returns false if it is still busy at the deadline.
  bool join_until(Time deadline);

  // Clock of the work that was enqueued last. The lock of the simulation guards it.
  VectorClock clock;

 private:
  struct Item {
    const char* name = nullptr;
    std::function<void()> kernel;
    std::shared_ptr<EventPoint> point;
  };
  void enqueue(Item item);
  void serve();
  void run(const Item& item) const;

  const int index_;
  const c10::Stream stream_;
  std::mt19937_64 random_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> items_;
  bool busy_ = false;
  bool stopping_ = false;
  bool ended_ = false;
  // The last member, as the thread uses all of the above.
  std::thread thread_;
};

}  // namespace penstock::sim
