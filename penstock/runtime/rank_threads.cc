#include "penstock/runtime/rank_threads.h"

#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>
#include <stdexcept>
#include <utility>

#include "penstock/tensor/autocast_scope.h"
#include "penstock/tensor/cpu_kernels.h"
#include "penstock/tensor/intra_op_threads.h"
#include "penstock/transport/start_thread.h"

namespace penstock::internal {
namespace {

// Time that a thread spins before it sleeps. The pause between two steps is usually short.
constexpr Clock::duration kAwake = std::chrono::microseconds(50);

// RankThreads that the calling thread belongs to, if any.
thread_local const RankThreads* serves_in = nullptr;

}  // namespace

// State of the caller's thread that the rank threads take over: autocast, and the thread-local state of libtorch's
// profilers.
struct RankThreads::Caller {
  AutocastState autocast;
  at::RecordFunctionTLS callbacks = at::get_record_function_tls_();
  std::shared_ptr<c10::ThreadLocalDebugInfo> profiler = c10::ThreadLocalDebugInfo::current();

  void apply_profiler() const {
    at::set_record_function_tls_(callbacks);
    c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(profiler);
  }
};

RankThreads::RankThreads(int ranks, int intra_op_threads)
    : monitor_(static_cast<unsigned>(ranks) < std::thread::hardware_concurrency() ? kAwake : Clock::duration::zero()) {
  prepare_vector_functions();
  threads_.reserve(static_cast<std::size_t>(ranks));
  try {
    for (int rank = 0; rank < ranks; ++rank) {
      threads_.push_back(start_thread([this, rank, intra_op_threads] { serve(rank, intra_op_threads); }));
    }
  } catch (...) {
    end_threads();
    throw;
  }
}

RankThreads::~RankThreads() {
  end_threads();
}

void RankThreads::end_threads() {
  {
    const MonitorLock lock(monitor_);
    ending_ = true;
    monitor_.notify_all();
  }
  join_threads();
}

void RankThreads::join_threads() {
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

void RankThreads::stop(Deadline deadline) {
  const int still_working = serves_in == this ? 1 : 0;
  {
    const MonitorLock lock(monitor_);
    const auto others_are_idle = [&]() PENSTOCK_REQUIRES(monitor_) { return working_ <= still_working; };
    if (monitor_.wait(deadline, others_are_idle) != WaitResult::Ready) return;
    if (still_working > 0) return;
    ending_ = true;
    monitor_.notify_all();
  }
  join_threads();
}

void RankThreads::serve(int rank, int intra_op_threads) {
  serves_in = this;
  const IntraOpThreads threads(intra_op_threads);
  const Caller initial;
  for (long done = 0;; ++done) {
    MonitorLock lock(monitor_);
    monitor_.wait(Deadline::max(), [&]() PENSTOCK_REQUIRES(monitor_) { return ending_ || round_ > done; });
    if (round_ == done) return;
    {
      const std::shared_ptr<const Caller> caller = caller_;
      // Valid without the lock: work_ does not change before this thread has finished the round.
      const std::function<void(int)>* const work = &work_;
      lock.unlock();
      const AutocastState::Scope autocast(caller->autocast);
      caller->apply_profiler();
      (*work)(rank);
      initial.apply_profiler();
    }
    lock.lock();
    if (--working_ == 0) caller_.reset();
    // The caller waits for all threads; a rank thread that exits the process waits for the others.
    if (working_ <= 1) monitor_.notify_all();
  }
}

void RankThreads::run(std::function<void(int)> work) {
  start(std::move(work));
  join();
}

void RankThreads::arm() {
  const MonitorLock lock(monitor_);
  released_ = false;
}

void RankThreads::start(std::function<void(int)> work) {
  join();
  const MonitorLock lock(monitor_);
  if (ending_) throw std::logic_error("the rank threads have ended, because the process exits.");
  work_ = std::move(work);
  caller_ = std::make_shared<const Caller>();
  working_ = static_cast<int>(threads_.size());
  ++round_;
  monitor_.notify_all();
}

bool RankThreads::wait() {
  const MonitorLock lock(monitor_);
  monitor_.wait(Deadline::max(), [&]() PENSTOCK_REQUIRES(monitor_) { return working_ == 0 || released_; });
  return working_ == 0;
}

void RankThreads::release() {
  const MonitorLock lock(monitor_);
  released_ = true;
  monitor_.notify_all();
}

bool RankThreads::are_idle() {
  const MonitorLock lock(monitor_);
  return working_ == 0;
}

void RankThreads::join() {
  const MonitorLock lock(monitor_);
  monitor_.wait(Deadline::max(), [&]() PENSTOCK_REQUIRES(monitor_) { return working_ == 0; });
}

}  // namespace penstock::internal
