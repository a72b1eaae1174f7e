#include "penstock/runtime/rank_threads.h"

#include <ATen/Parallel.h>

#include <utility>

namespace penstock {
namespace {

// Between two steps there is most often little to do.
constexpr Clock::duration kAwake = std::chrono::microseconds(50);

}  // namespace

RankThreads::RankThreads(int ranks, int intra_op_threads)
    : gate_(static_cast<unsigned>(ranks) < std::thread::hardware_concurrency() ? kAwake : Clock::duration::zero()) {
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
  for (long done = 0;; ++done) {
    Gate::Lock lock = gate_.lock();
    gate_.wait(lock, Deadline::max(), [&] { return ending_ || round_ > done; });
    if (round_ == done) return;
    lock.unlock();
    work_(rank);
    lock.lock();
    if (--working_ == 0) gate_.changed();
  }
}

void RankThreads::run(std::function<void(int)> work) {
  join();
  Gate::Lock lock = gate_.lock();
  work_ = std::move(work);
  working_ = static_cast<int>(threads_.size());
  released_ = false;
  ++round_;
  gate_.changed();
  gate_.wait(lock, Deadline::max(), [&] { return working_ == 0 || released_; });
}

void RankThreads::release() {
  const Gate::Lock lock = gate_.lock();
  released_ = true;
  gate_.changed();
}

void RankThreads::join() {
  Gate::Lock lock = gate_.lock();
  gate_.wait(lock, Deadline::max(), [&] { return working_ == 0; });
}

}  // namespace penstock
