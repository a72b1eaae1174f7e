// Enables autocast on the calling thread in a scope.
#pragma once

#include <ATen/autocast_mode.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

namespace penstock {

// Enables or disables autocast for a device type on the calling thread until it is destroyed, on the same thread.
// Disables the cache of cast weights meanwhile: the cache is one for the process, and would return a stale copy of a
// weight that has changed.
//
//   const AutocastScope autocast(at::kCPU, at::kBFloat16);
class AutocastScope {
 public:
  AutocastScope(at::DeviceType device, at::ScalarType dtype, bool enabled = true)
      : device_(device),
        was_enabled_(at::autocast::is_autocast_enabled(device_)),
        dtype_(at::autocast::get_autocast_dtype(device_)),
        cached_(at::autocast::is_autocast_cache_enabled()) {
    at::autocast::set_autocast_enabled(device_, enabled);
    at::autocast::set_autocast_dtype(device_, dtype);
    at::autocast::set_autocast_cache_enabled(false);
  }
  ~AutocastScope() {
    at::autocast::set_autocast_enabled(device_, was_enabled_);
    at::autocast::set_autocast_dtype(device_, dtype_);
    at::autocast::set_autocast_cache_enabled(cached_);
  }
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;

 private:
  at::DeviceType device_;
  bool was_enabled_;
  at::ScalarType dtype_;
  bool cached_;
};

}  // namespace penstock
