#include "penstock/runtime/failure_log.h"

#include <utility>

namespace penstock::internal {

void FailureLog::add(std::size_t local_rank, RankReport failure) noexcept {
  const MutexLock lock(mutex_);
  if (!std::exchange(has_failed_, true)) {
    reason_ = text_without_memory([&] { return failure.failure; });
  }
  failures_[local_rank] = std::move(failure);
}

void FailureLog::cancel(const std::string& reason) {
  const MutexLock lock(mutex_);
  is_cancelled_ = true;
  if (!std::exchange(has_failed_, true)) reason_ = reason;
}

bool FailureLog::has_failed() const {
  const MutexLock lock(mutex_);
  return has_failed_;
}

bool FailureLog::is_cancelled() const {
  const MutexLock lock(mutex_);
  return is_cancelled_;
}

std::string FailureLog::reason() const {
  const MutexLock lock(mutex_);
  return reason_;
}

RankReport FailureLog::failure(std::size_t local_rank) const {
  const MutexLock lock(mutex_);
  return failures_[local_rank];
}

}  // namespace penstock::internal
