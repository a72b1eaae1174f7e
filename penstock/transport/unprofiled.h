// Begins work of c10d without a range in libtorch's profiler. A c10d::Work opens its range on the thread that begins it and
// closes it when it completes. Receives of the control channel complete after the profile has ended, or never: the range
// would be closed in memory that the profiler has freed.
#pragma once

#include <ATen/record_function.h>

namespace penstock::internal {

template <class Begin>
auto unprofiled(const Begin& begin) {
  const at::DisableRecordFunctionGuard guard;
  return begin();
}

}  // namespace penstock::internal
