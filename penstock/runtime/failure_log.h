// Collects what the ranks of this process throw during one step. Ranks, the caller and cancel() use it from different
// threads.
#pragma once

#include <cstddef>
#include <new>
#include <string>
#include <vector>

#include "penstock/base/mutex.h"
#include "penstock/runtime/failure.h"

namespace penstock::internal {

class FailureLog {
 public:
  explicit FailureLog(std::size_t local_ranks) : failures_(local_ranks) {}

  // Records what a rank has thrown. The first failure or cancellation is the reason of the step's failure. Does not
  // throw when there is no memory left.
  void add(std::size_t local_rank, RankReport failure) noexcept;
  // Records that the step was cancelled.
  void cancel(const std::string& reason);

  bool has_failed() const;
  bool is_cancelled() const;
  std::string reason() const;
  // Returns what a rank has thrown, without its place in the schedule.
  RankReport failure(std::size_t local_rank) const;

 private:
  // Protects all members. No other lock is acquired while it is held.
  mutable Mutex mutex_;
  bool has_failed_ PENSTOCK_GUARDED_BY(mutex_) = false;
  bool is_cancelled_ PENSTOCK_GUARDED_BY(mutex_) = false;
  std::string reason_ PENSTOCK_GUARDED_BY(mutex_);
  std::vector<RankReport> failures_ PENSTOCK_GUARDED_BY(mutex_);
};

// Returns what `text` returns, or a text that is short enough to need no allocation if there is no memory left.
template <class Text>
std::string text_without_memory(const Text& text) noexcept {
  try {
    return text();
  } catch (const std::bad_alloc&) {
    return "out of memory";
  }
}

}  // namespace penstock::internal
