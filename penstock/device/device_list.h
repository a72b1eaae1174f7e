// Devices as a user names them, and how they are dealt to ranks.
//
//   const DeviceList devices = parse_devices("cuda:0,1").complete();   // throws DeviceError if there is no such device
//   const at::Device device = devices.of(rank);                        // cuda:0, cuda:1, cuda:0, …
#pragma once

#include <c10/core/Device.h>

#include <stdexcept>
#include <string>
#include <vector>

namespace penstock::internal {

// Thrown for a device that does not exist, or that this process cannot use. The message has what was found and a hint.
class DeviceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class DeviceList {
 public:
  // Makes a list with the CPU, which all ranks share.
  DeviceList() = default;
  // Makes a list of devices of one type, all with an index but for the CPU. None stands for all devices of the type.
  DeviceList(at::DeviceType type, std::vector<at::Device> devices) : type_(type), devices_(std::move(devices)) {}

  at::DeviceType type() const { return type_; }
  bool is_cpu() const { return type_ == at::kCPU; }
  const std::vector<at::Device>& devices() const { return devices_; }

  // Returns the list with all devices of the type if it has none. Throws DeviceError if libtorch does not support the
  // type, or if there is no such device.
  DeviceList complete() const;
  // Returns the device of a rank, counted among the ranks of this machine. The devices are dealt in turn. Requires a
  // complete list.
  at::Device of(int rank) const;
  // Returns the text that parse_devices() reads: "cpu", "cuda:0,1".
  std::string text() const;

 private:
  at::DeviceType type_ = at::kCPU;
  std::vector<at::Device> devices_{at::Device(at::kCPU)};
};

// Reads "cpu", "cuda", "cuda:0,1", "xpu", "sim" or "sim:0,2". Throws DeviceError.
DeviceList parse_devices(const std::string& text);

// Returns the name of a type of device, as in parse_devices().
std::string device_type_name(at::DeviceType type);

}  // namespace penstock::internal
