#include "penstock/transport/device_operations.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <future>
#include <memory>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/transport/start_thread.h"

namespace penstock::internal {
namespace {

// Times between two polls. They grow while nothing completes.
constexpr std::chrono::microseconds kFirstPause{500};
constexpr std::chrono::microseconds kLongestPause{16'000};

// Time that the rank's thread has to catch an error and broadcast it with its report, and that an operation has to
// complete after its peer has left.
constexpr Clock::duration kGracePeriod = std::chrono::seconds(1);

// Time that devices have to leave the operations of aborted backends.
constexpr std::chrono::seconds kIdleTime{2};

// Blocks until the devices have ended all work that they have been given. Returns false if they take too long.
bool wait_until_idle(const std::vector<at::Device>& devices) {
  if (devices.empty()) return true;
  std::packaged_task<void()> wait([devices] {
    for (const at::Device device : devices) synchronize_device(device);
  });
  const std::future<void> result = wait.get_future();
  // A wait for a device that hangs cannot be ended, so nobody joins the thread.
  std::thread(std::move(wait)).detach();
  return result.wait_for(kIdleTime) == std::future_status::ready;
}

// State of an operation: over with success, over with an error, or not over.
struct Outcome {
  bool is_over = false;
  std::exception_ptr error;
};

Outcome outcome_of(c10d::Work& work) {
  try {
    if (!work.isCompleted()) return {};
    return {.is_over = true, .error = work.exception()};
  } catch (...) {
    // A device that has failed cannot be asked.
    return {.is_over = true, .error = std::current_exception()};
  }
}

}  // namespace

void DeviceOperations::add_backend(c10::intrusive_ptr<c10d::Backend> backend, at::Device device) {
  const MonitorLock lock(monitor_);
  backends_.push_back(std::move(backend));
  if (std::ranges::find(devices_, device) == devices_.end()) devices_.push_back(device);
  if (thread_.joinable() || ending_) return;
  thread_ = start_thread([this] { run(); });
  pthread_setname_np(thread_.native_handle(), "penstock-device");
}

void DeviceOperations::add(DeviceOperation operation) {
  std::vector<Running> completed;
  const MonitorLock lock(monitor_);
  // Memory of sends is freed here rather than by the thread, which looks less often. A backend that is being aborted is
  // not asked, as it may hold a lock meanwhile.
  std::erase_if(running_, [&](Running& running) {
    if (aborting_ || running.operation.tensors.empty()) return false;
    const Outcome outcome = outcome_of(*running.operation.works.back());
    if (!outcome.is_over || outcome.error) return false;
    complete(running, completed);
    return true;
  });
  running_.push_back({.operation = std::move(operation), .since = std::nullopt, .end_of_peer = std::nullopt});
  // While others are in flight, the thread does not sleep for long.
  if (running_.size() == 1) monitor_.notify_all();
}

void DeviceOperations::begin_step() {
  const MonitorLock lock(monitor_);
  received_.clear();
}

void DeviceOperations::complete(Running& running, std::vector<Running>& completed) {
  const DeviceOperation& operation = running.operation;
  if (operation.tag && !operation.is_receive) received_.insert({operation.peer, operation.tag->channel});
  completed.push_back(std::move(running));
}

void DeviceOperations::limit_sends(int to, std::uint32_t kind, const SendLimit& limit, std::atomic<int>& waiting_for,
                                   Deadline deadline) {
  const MonitorLock lock(monitor_);
  const auto is_within = [&]() PENSTOCK_REQUIRES(monitor_) {
    std::size_t number = 0;
    std::size_t bytes = 0;
    bool is_first = true;
    for (const Running& running : running_) {
      const DeviceOperation& sent = running.operation;
      if (!sent.tag || sent.is_receive || sent.peer != to || sent.tag->channel % 2 != kind) continue;
      if (std::exchange(is_first, false) && !received_.contains({to, sent.tag->channel})) return true;
      number += sent.tensors.size();
      for (const at::Tensor& tensor : sent.tensors) bytes += tensor.nbytes();
    }
    return aborting_ || number <= limit.least || (number <= limit.most && bytes <= limit.bytes);
  };
  if (is_within()) return;
  waiting_for.store(to, std::memory_order_relaxed);
  if (monitor_.wait(deadline, is_within) != WaitResult::Ready) {
    throw TransportError(TransportError::Why::Timeout, to,
                         concat("no receive was posted on rank ", to, " within the deadline"));
  }
  waiting_for.store(TransportError::kNoPeer, std::memory_order_relaxed);
}

void DeviceOperations::end_step(const StreamPoint& end, Deadline deadline) {
  const Clock::duration timeout = deadline - Clock::now();
  const MonitorLock lock(monitor_);
  for (Running& running : running_) {
    if (running.operation.timeout) continue;
    running.operation.awaited = end;
    running.operation.timeout = timeout;
  }
}

std::size_t DeviceOperations::in_flight() {
  const MonitorLock lock(monitor_);
  return running_.size();
}

std::optional<AwaitedMessage> DeviceOperations::awaited() {
  const MonitorLock lock(monitor_);
  std::optional<AwaitedMessage> oldest;
  for (const Running& running : running_) {
    const DeviceOperation& operation = running.operation;
    if (!running.since || !operation.tag || (oldest && oldest->since <= *running.since)) continue;
    oldest = {
        .peer = operation.peer, .tag = *operation.tag, .is_receive = operation.is_receive, .since = *running.since};
  }
  return oldest;
}

void DeviceOperations::drain(Deadline deadline) {
  const MonitorLock lock(monitor_);
  const auto is_over = [this]() PENSTOCK_REQUIRES(monitor_) { return aborting_ || running_.empty(); };
  const bool has_timeouts =
      std::ranges::all_of(running_, [](const Running& running) { return running.operation.timeout.has_value(); });
  monitor_.wait(has_timeouts ? Deadline::max() : deadline, is_over);
}

void DeviceOperations::abort() noexcept {
  const MonitorLock lock(monitor_);
  aborting_ = true;
  monitor_.notify_all();
}

void DeviceOperations::stop(bool has_others) {
  bool is_unfinished = has_others;
  {
    const MonitorLock lock(monitor_);
    is_unfinished = is_unfinished || !running_.empty();
    ending_ = true;
    aborting_ = true;
    monitor_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  abort_backends();
  // Destroyed after the operations.
  std::vector<c10::intrusive_ptr<c10d::Backend>> backends;
  auto running = std::make_unique<std::vector<Running>>();
  std::vector<at::Device> devices;
  {
    const MonitorLock lock(monitor_);
    running->swap(running_);
    backends.swap(backends_);
    devices.swap(devices_);
    aborted_ = 0;
  }
  if (is_unfinished && !wait_until_idle(devices)) {
    // The device may still use the memory.
    running.release();  // NOLINT(bugprone-unused-return-value)
  }
}

std::exception_ptr DeviceOperations::poll(const std::vector<int>& left, std::vector<Running>& completed, int& peer) {
  std::exception_ptr error;
  const auto fail = [&](const Running& running, const std::exception_ptr& found) {
    if (error) return;
    error = found;
    peer = running.operation.peer;
  };
  std::erase_if(running_, [&](Running& running) {
    DeviceOperation& operation = running.operation;
    const Outcome outcome = outcome_of(*operation.works.back());
    if (outcome.is_over) {
      // A failed operation may not have left its stream yet, so it keeps its tensors.
      if (outcome.error) {
        fail(running, outcome.error);
        return false;
      }
      complete(running, completed);
      return true;
    }
    if (std::ranges::find(left, operation.peer) != left.end()) {
      if (!running.end_of_peer) running.end_of_peer = Clock::now() + kGracePeriod;
      if (Clock::now() > *running.end_of_peer) {
        fail(running, std::make_exception_ptr(TransportError(TransportError::Why::PeerLost, operation.peer,
                                                             concat("rank ", operation.peer, " has ended"))));
      }
    }
    if (!operation.timeout) return false;
    try {
      if (!running.since && !operation.awaited.is_reached()) return false;
    } catch (...) {
      fail(running, std::current_exception());
      return false;
    }
    if (!running.since) {
      running.since = Clock::now();
      running.deadline =
          *running.since + std::clamp<Clock::duration>(*operation.timeout, Clock::duration::zero(), kForever);
    }
    if (Clock::now() > running.deadline) {
      fail(running, std::make_exception_ptr(TransportError(TransportError::Why::Timeout, operation.peer,
                                                           operation.what + " within the deadline")));
    }
    return false;
  });
  return error;
}

void DeviceOperations::run() {
  auto pause = kFirstPause;
  MonitorLock lock(monitor_);
  for (;;) {
    const auto must_abort = [this]() PENSTOCK_REQUIRES(monitor_) { return aborting_ && aborted_ < backends_.size(); };
    const Deadline next = running_.empty() || aborting_ ? Deadline::max() : Clock::now() + pause;
    const bool was_idle = running_.empty();
    monitor_.wait(next, [&]() PENSTOCK_REQUIRES(monitor_) {
      return ending_ || must_abort() || (!aborting_ && was_idle && !running_.empty());
    });
    if (ending_) return;
    if (aborting_) {
      lock.unlock();
      abort_backends();
      lock.lock();
      continue;
    }
    lock.unlock();
    const std::vector<int> left = control_->ranks_that_left();
    lock.lock();
    std::vector<Running> completed;
    int peer = TransportError::kNoPeer;
    const std::exception_ptr error = poll(left, completed, peer);
    pause = !completed.empty() || was_idle ? kFirstPause : std::min(2 * pause, kLongestPause);
    if (running_.empty() || !completed.empty()) monitor_.notify_all();
    lock.unlock();
    completed.clear();
    if (error) fail(error, peer);
    lock.lock();
  }
}

void DeviceOperations::fail(const std::exception_ptr& error, int peer) {
  try {
    try {
      std::rethrow_exception(error);
    } catch (const TransportError&) {
      throw;
    } catch (const std::exception& cause) {
      control_->throw_connection_lost(peer, cause);
    }
  } catch (const TransportError& found) {
    // It calls abort().
    control_->fail(found);
  }
  abort_backends();
  MonitorLock lock(monitor_);
  monitor_.wait(Clock::now() + kGracePeriod, [this]() PENSTOCK_REQUIRES(monitor_) { return ending_; });
  if (ending_) return;
  lock.unlock();
  // Between two steps nobody else does. The text is that of fail().
  control_->abort("");
}

void DeviceOperations::abort_backends() {
  std::vector<c10::intrusive_ptr<c10d::Backend>> backends;
  {
    const MonitorLock lock(monitor_);
    backends.assign(backends_.begin() + static_cast<std::ptrdiff_t>(aborted_), backends_.end());
    aborted_ = backends_.size();
  }
  // An abort may wait for the device, and so for operations of backends that have not been aborted yet. It has no
  // timeout, so nobody joins its thread.
  std::vector<std::future<void>> ends;
  for (const auto& backend : backends) {
    std::packaged_task<void()> abort([backend] { backend->abort(); });
    ends.push_back(abort.get_future());
    std::thread(std::move(abort)).detach();
  }
  const Deadline deadline = Clock::now() + kIdleTime;
  for (const std::future<void>& end : ends) end.wait_until(deadline);
}

}  // namespace penstock::internal
