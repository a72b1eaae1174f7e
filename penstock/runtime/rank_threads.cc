#include "penstock/runtime/rank_threads.h"

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sqrt.h>

#include <memory>
#include <utility>

namespace penstock {
namespace {

// Between two steps there is most often little to do.
constexpr Clock::duration kAwake = std::chrono::microseconds(50);

// MKL makes its vector functions ready at the first call of one of them, and a call from another thread meanwhile is
// exact to three or four digits only.
void make_vector_functions_ready() {
  [[maybe_unused]] static const bool ready = at::sqrt(at::ones(1)).defined();
}

}  // namespace

RankThreads::RankThreads(int ranks, int intra_op_threads)
    : gate_(static_cast<unsigned>(ranks) < std::thread::hardware_concurrency() ? kAwake : Clock::duration::zero()) {
  make_vector_functions_ready();
  threads_.reserve(static_cast<std::size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) {
    threads_.emplace_back([this, rank, intra_op_threads] { serve(rank, intra_op_threads); });
  }
}

RankThreads::~RankThreads() {
  {
    const Gate::Lock lock = gate_.lock();
    ending_ = true;
    gate_.changed();
  }
  for (std::thread& thread : threads_) thread.join();
}

void RankThreads::serve(int rank, int intra_op_threads) {
  at::set_num_threads(intra_op_threads);
  // One cache a process: what is cast in it would outlive a weight's change.
  at::autocast::set_autocast_cache_enabled(false);
  for (long done = 0;; ++done) {
    Gate::Lock lock = gate_.lock();
    gate_.wait(lock, Deadline::max(), [&] { return ending_ || round_ > done; });
    if (round_ == done) return;
    const std::shared_ptr<const at::ThreadLocalState> caller = caller_;
    lock.unlock();
    {
      const at::ThreadLocalStateGuard as_caller(*caller);
      work_(rank);
    }
    lock.lock();
    if (--working_ == 0) gate_.changed();
  }
}

void RankThreads::run(std::function<void(int)> work) {
  join();
  Gate::Lock lock = gate_.lock();
  work_ = std::move(work);
  caller_ = std::make_shared<const at::ThreadLocalState>();
  working_ = static_cast<int>(threads_.size());
  ++round_;
  gate_.changed();
  waiting_ = true;
  gate_.wait(lock, Deadline::max(), [&] { return working_ == 0 || !waiting_; });
  waiting_ = false;
}

void RankThreads::release() {
  const Gate::Lock lock = gate_.lock();
  waiting_ = false;
  gate_.changed();
}

bool RankThreads::are_idle() {
  const Gate::Lock lock = gate_.lock();
  return working_ == 0;
}

void RankThreads::join() {
  Gate::Lock lock = gate_.lock();
  gate_.wait(lock, Deadline::max(), [&] { return working_ == 0; });
}

}  // namespace penstock
