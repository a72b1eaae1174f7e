// Starts a c10d::Work without a range in libtorch's profiler. A Work opens its range on the thread that starts it and
// closes the range when it completes. Receives of the control channel complete after the profile has ended, or never:
// the range would be closed in memory that the profiler has freed.
#pragma once

#include <ATen/record_function.h>

namespace penstock::internal {

template <class Start>
auto unprofiled(const Start& start) {
  const at::DisableRecordFunctionGuard guard;
  return start();
}

}  // namespace penstock::internal
