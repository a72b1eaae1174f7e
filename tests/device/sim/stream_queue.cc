#include "tests/device/sim/stream_queue.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cstdio>
#include <utility>

#include "penstock/tensor/intra_op_threads.h"
#include "tests/device/sim/sim_device.h"

namespace penstock::sim {

std::atomic<int> max_delay_us{0};

void EventPoint::pass() {
  const std::lock_guard lock(mutex_);
  time_ = std::chrono::steady_clock::now();
  passed_ = true;
  passed_condition_.notify_all();
}

void EventPoint::wait() {
  std::unique_lock lock(mutex_);
  passed_condition_.wait(lock, [this] { return passed_; });
}

bool EventPoint::wait_until(Time deadline) {
  std::unique_lock lock(mutex_);
  return passed_condition_.wait_until(lock, deadline, [this] { return passed_; });
}

bool EventPoint::is_passed() {
  const std::lock_guard lock(mutex_);
  return passed_;
}

Time EventPoint::time() {
  const std::lock_guard lock(mutex_);
  return time_;
}

StreamQueue::StreamQueue(int index, c10::Stream stream, std::uint64_t seed)
    : index_(index), stream_(stream), random_(seed), thread_([this] { serve(); }) {}

void StreamQueue::push(const char* name, std::function<void()> kernel) {
  enqueue({name, std::move(kernel), nullptr});
}

void StreamQueue::push(std::shared_ptr<EventPoint> point) {
  enqueue({"event", {}, std::move(point)});
}

void StreamQueue::enqueue(Item item) {
  {
    const std::lock_guard lock(mutex_);
    if (!stopping_) {
      items_.push_back(std::move(item));
      changed_.notify_all();
      return;
    }
  }
  if (item.point) item.point->pass();
}

bool StreamQueue::is_idle() {
  const std::lock_guard lock(mutex_);
  return !busy_ && items_.empty();
}

void StreamQueue::request_stop() {
  std::deque<Item> discarded;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    discarded.swap(items_);
    changed_.notify_all();
  }
  for (const Item& item : discarded) {
    if (item.point) item.point->pass();
  }
}

bool StreamQueue::join_until(Time deadline) {
  {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_until(lock, deadline, [this] { return ended_; })) return false;
  }
  if (thread_.joinable()) thread_.join();
  return true;
}

void StreamQueue::serve() {
  // Short sleeps should be short.
  ::prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);
  ::prctl(PR_SET_NAME, "sim_stream", 0UL, 0UL, 0UL);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::AutoGradMode no_grad(false);
  // Sums of the CPU's kernels depend on the number of threads, and a device's results on no setting of the host.
  // The thread may end when the process exits, and so restores nothing.
  internal::set_intra_op_threads(1);
  for (;;) {
    Item item;
    {
      std::unique_lock lock(mutex_);
      busy_ = false;
      changed_.notify_all();
      changed_.wait(lock, [this] { return stopping_ || !items_.empty(); });
      if (stopping_) {
        ended_ = true;
        changed_.notify_all();
        return;
      }
      item = std::move(items_.front());
      items_.pop_front();
      busy_ = true;
    }
    const int longest = max_delay_us.load();
    if (longest > 0 && random_() % 4 == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(random_() % static_cast<std::uint64_t>(longest)));
    }
    run(item);
  }
}

void StreamQueue::run(const Item& item) const {
  if (item.point) {
    item.point->pass();
    return;
  }
  try {
    item.kernel();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "sim: %s on stream %d of device %d failed: %s\n", item.name, static_cast<int>(stream_.id()),
                 static_cast<int>(stream_.device_index()), error.what());
    std::fflush(stderr);
    ::_exit(kExitKernelFailed);
  }
}

}  // namespace penstock::sim
