#include "penstock/transport/staging_thread.h"

#include <pthread.h>

#include <utility>

#include "penstock/device/faults.h"
#include "penstock/transport/start_thread.h"

namespace penstock::internal {
void StagingThread::add(StreamPoint ready, std::function<void()> function) {
  const MonitorLock lock(monitor_);
  if (error_) std::rethrow_exception(error_);
  items_.push_back({std::move(ready), std::move(function)});
  if (!thread_.joinable() && !ending_) {
    thread_ = start_thread([this] { run(); });
    // A debugger shows it, and tests tell its waits for devices from those of ranks.
    pthread_setname_np(thread_.native_handle(), "penstock-stage");
  }
  monitor_.notify_all();
}

void StagingThread::throw_if_failed() {
  const MonitorLock lock(monitor_);
  if (error_) std::rethrow_exception(error_);
}

void StagingThread::stop() {
  {
    const MonitorLock lock(monitor_);
    ending_ = true;
    monitor_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void StagingThread::run() {
  MonitorLock lock(monitor_);
  for (;;) {
    monitor_.wait(Deadline::max(), [this]() PENSTOCK_REQUIRES(monitor_) { return ending_ || !items_.empty(); });
    if (ending_) return;
    is_busy_ = true;
    std::exception_ptr error;
    {
      const Item item = std::move(items_.front());
      items_.pop_front();
      lock.unlock();
      try {
        run(item);
      } catch (...) {
        error = std::current_exception();
      }
    }
    lock.lock();
    is_busy_ = false;
    error_ = error;
    monitor_.notify_all();
    if (error_) return;
  }
}

void StagingThread::run(const Item& item) {
  while (!is_injected(Fault::EarlySend) && !item.ready.wait(Clock::now() + kPause)) {
    const MonitorLock lock(monitor_);
    if (ending_) return;
  }
  item.function();
}

}  // namespace penstock::internal
