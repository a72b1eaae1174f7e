#include "penstock/device/device_list.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

#include "penstock/base/text.h"

namespace penstock::internal {
namespace {

constexpr const char* kForms = "\n  Hint: devices are cpu, cuda, cuda:0,1, xpu and sim.";

struct NamedType {
  std::string_view name;
  at::DeviceType type;
};
// The simulated device of the tests has the type for private use.
constexpr std::array<NamedType, 4> kTypes{{{"cpu", c10::DeviceType::CPU},
                                           {"cuda", c10::DeviceType::CUDA},
                                           {"xpu", c10::DeviceType::XPU},
                                           {"sim", c10::DeviceType::PrivateUse1}}};

std::optional<at::DeviceIndex> parse_index(std::string_view text) {
  int index = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), index);
  const bool is_valid = error == std::errc() && end == text.data() + text.size() && index >= 0 &&
                        index <= std::numeric_limits<at::DeviceIndex>::max();
  return is_valid ? std::optional(static_cast<at::DeviceIndex>(index)) : std::nullopt;
}

// Returns the number of devices of a type. Throws DeviceError if libtorch does not support the type.
int count_devices(at::DeviceType type) {
  const std::string name = device_type_name(type);
  const std::optional<at::DeviceType> accelerator = at::accelerator::getAccelerator(/*checked=*/false);
  const bool has_type = c10::impl::hasDeviceGuardImpl(type);
  if (accelerator && *accelerator != type && has_type) {
    throw DeviceError(concat("the accelerator of this process is ", device_type_name(*accelerator), "; found ", name,
                             ".\n  Hint: a process can use one type of accelerator."));
  }
  if (!has_type) {
    throw DeviceError(concat("this build of libtorch does not support ", name,
                             " devices.\n  Hint: install a build of "
                             "torch for ",
                             name, " and add its directory torch/lib to LD_LIBRARY_PATH, or use the CPU."));
  }
  return c10::impl::VirtualGuardImpl(type).deviceCount();
}

}  // namespace

std::string device_type_name(at::DeviceType type) {
  const auto* const found = std::ranges::find(kTypes, type, &NamedType::type);
  return found == kTypes.end() ? c10::DeviceTypeName(type, /*lower_case=*/true) : std::string(found->name);
}

DeviceList parse_devices(const std::string& text) {
  const std::size_t colon = text.find(':');
  const std::string_view name = std::string_view(text).substr(0, colon);
  const auto* const type = std::ranges::find(kTypes, name, &NamedType::name);
  if (type == kTypes.end()) throw DeviceError(concat("there is no device type '", std::string(name), "'.", kForms));
  if (colon == std::string::npos) {
    return type->type == at::kCPU ? DeviceList() : DeviceList(type->type, {});
  }
  if (type->type == at::kCPU) throw DeviceError(concat("the CPU has no index; found '", text, "'.", kForms));
  std::vector<at::Device> devices;
  std::string_view rest = std::string_view(text).substr(colon + 1);
  for (bool is_last = false; !is_last;) {
    const std::size_t comma = rest.find(',');
    is_last = comma == std::string_view::npos;
    const std::string_view word = rest.substr(0, comma);
    const std::optional<at::DeviceIndex> index = parse_index(word);
    if (!index) {
      throw DeviceError(concat("'", text, "': '", std::string(word), "' is not the index of a device.", kForms));
    }
    const at::Device device(type->type, *index);
    if (std::ranges::find(devices, device) != devices.end()) {
      throw DeviceError(concat("'", text, "' names device ", int{*index},
                               " twice.\n  Hint: ranks share devices when there ", "are more ranks than devices."));
    }
    devices.push_back(device);
    if (!is_last) rest.remove_prefix(comma + 1);
  }
  return {type->type, std::move(devices)};
}

DeviceList DeviceList::complete() const {
  if (is_cpu()) return *this;
  const std::string name = device_type_name(type_);
  const int count = count_devices(type_);
  if (count == 0) {
    throw DeviceError(concat("there is no device of type ", name, ".\n  Hint: ",
                             type_ == at::kCUDA ? "`nvidia-smi` lists GPUs and tests the driver; CUDA_VISIBLE_DEVICES "
                                                  "may hide them."
                                                : "the tools of its driver list devices."));
  }
  DeviceList complete = *this;
  if (devices_.empty()) {
    for (int index = 0; index < count; ++index) {
      complete.devices_.emplace_back(type_, static_cast<at::DeviceIndex>(index));
    }
  }
  for (const at::Device device : complete.devices_) {
    if (device.index() < count) continue;
    throw DeviceError(concat("there ", count == 1 ? "is 1 device" : concat("are ", count, " devices"), " of type ",
                             name, ", numbered from 0; found ", name, ":", int{device.index()}, "."));
  }
  return complete;
}

at::Device DeviceList::of(int rank) const {
  return devices_.at(static_cast<std::size_t>(rank) % devices_.size());
}

std::string DeviceList::text() const {
  std::string text = device_type_name(type_);
  if (is_cpu()) return text;
  for (std::size_t i = 0; i < devices_.size(); ++i) {
    text += concat(i == 0 ? ":" : ",", int{devices_[i].index()});
  }
  return text;
}

}  // namespace penstock::internal
