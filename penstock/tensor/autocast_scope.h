// Enables autocast on the calling thread in a scope.
#pragma once

#include <ATen/autocast_mode.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <cstddef>
#include <optional>
#include <tuple>
#include <type_traits>

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

namespace internal {

// Autocast of one thread, for every type of device, which another thread may take over.
class AutocastState {
  using Devices = std::remove_const_t<decltype(at::autocast::_AUTOCAST_SUPPORTED_DEVICES)>;

 public:
  // Takes the state of the calling thread.
  AutocastState() {
    for (std::size_t i = 0; i < kDevices.size(); ++i) types_[i] = state_of(kDevices[i]);
  }

  // Gives the state to the calling thread until it is destroyed, on the same thread. Disables the cache of cast weights
  // meanwhile, as AutocastScope does.
  class Scope {
   public:
    explicit Scope(const AutocastState& state) : cached_(at::autocast::is_autocast_cache_enabled()) {
      at::autocast::set_autocast_cache_enabled(false);
      for (std::size_t i = 0; i < kDevices.size(); ++i) {
        const OfType& wanted = state.types_[i];
        if (state_of(kDevices[i]) != wanted) scopes_[i].emplace(kDevices[i], wanted.dtype, wanted.enabled);
      }
    }
    // Each scope restores what it found, so they end in reverse order.
    ~Scope() {
      for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) scope->reset();
      at::autocast::set_autocast_cache_enabled(cached_);
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    bool cached_;
    std::array<std::optional<AutocastScope>, std::tuple_size_v<Devices>> scopes_;
  };

  friend bool operator==(const AutocastState&, const AutocastState&) = default;

  // Calls visit(dtype, enabled) for each type of device, in a fixed order.
  template <class Visit>
  void for_each_type(const Visit& visit) const {
    for (const OfType& type : types_) visit(type.dtype, type.enabled);
  }

 private:
  struct OfType {
    at::ScalarType dtype = at::kFloat;
    bool enabled = false;
    friend bool operator==(const OfType&, const OfType&) = default;
  };
  static constexpr auto& kDevices = at::autocast::_AUTOCAST_SUPPORTED_DEVICES;
  static OfType state_of(at::DeviceType device) {
    return {.dtype = at::autocast::get_autocast_dtype(device), .enabled = at::autocast::is_autocast_enabled(device)};
  }

  std::array<OfType, std::tuple_size_v<Devices>> types_;
};

}  // namespace internal
}  // namespace penstock
