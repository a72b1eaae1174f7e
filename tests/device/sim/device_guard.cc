#include "tests/device/sim/device_guard.h"

#include <chrono>
#include <memory>

#include "tests/device/sim/allocators.h"
#include "tests/device/sim/simulation.h"

namespace penstock::sim {
namespace {

// An event of c10 is a pointer to this. Recording it again replaces the point.
struct Event {
  std::shared_ptr<EventPoint> point;
};

const std::shared_ptr<EventPoint>& point_of(void* event) {
  return static_cast<Event*>(event)->point;
}

c10::DeviceIndex index_of(c10::Device device) {
  return device.has_index() ? device.index() : current_device();
}

}  // namespace

c10::DeviceType SimDeviceGuard::type() const {
  return kSim;
}

c10::Device SimDeviceGuard::exchangeDevice(c10::Device device) const {
  const c10::Device previous = getDevice();
  setDevice(device);
  return previous;
}

c10::Device SimDeviceGuard::getDevice() const {
  return {kSim, current_device()};
}

void SimDeviceGuard::setDevice(c10::Device device) const {
  TORCH_CHECK(device.type() == kSim && device.index() >= 0 && device.index() < deviceCount(),
              "sim: there is no device ", device, "; there are ", static_cast<int>(deviceCount()));
  set_current_device(device.index());
}

void SimDeviceGuard::uncheckedSetDevice(c10::Device device) const noexcept {
  if (device.index() >= 0) set_current_device(device.index());
}

c10::DeviceIndex SimDeviceGuard::deviceCount() const noexcept {
  return static_cast<c10::DeviceIndex>(Simulation::get().options().devices);
}

c10::DeviceCapability SimDeviceGuard::getDeviceCapability(c10::Device /*device*/) const {
  return {};
}

c10::Stream SimDeviceGuard::getStream(c10::Device device) const {
  return current_stream(device.index());
}

c10::Stream SimDeviceGuard::getDefaultStream(c10::Device device) const {
  return c10::Stream(c10::Stream::DEFAULT, c10::Device(kSim, index_of(device)));
}

c10::Stream SimDeviceGuard::getStreamFromGlobalPool(c10::Device device, bool is_high_priority) const {
  return Simulation::get().stream_from_pool(index_of(device), is_high_priority);
}

c10::Stream SimDeviceGuard::getNewStream(c10::Device device, int priority) const {
  return Simulation::get().stream_from_pool(index_of(device), priority < 0);
}

c10::Stream SimDeviceGuard::exchangeStream(c10::Stream stream) const {
  return exchange_stream(stream);
}

void* SimDeviceGuard::getStreamNativeHandle(c10::Stream stream) const {
  return reinterpret_cast<void*>(static_cast<std::intptr_t>(stream.id()));
}

bool SimDeviceGuard::queryStream(const c10::Stream& stream) const {
  return Simulation::get().query(stream);
}

void SimDeviceGuard::synchronizeStream(const c10::Stream& stream) const {
  Simulation::get().wait(stream);
}

void SimDeviceGuard::synchronizeDevice(c10::DeviceIndex device) const {
  Simulation::get().wait_for_device(device < 0 ? current_device() : device);
}

void SimDeviceGuard::recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const {
  device_allocator().recordStream(pointer, stream);
}

void SimDeviceGuard::destroyEvent(void* event, c10::DeviceIndex /*device*/) const noexcept {
  delete static_cast<Event*>(event);
}

void SimDeviceGuard::record(void** event, const c10::Stream& stream, c10::DeviceIndex device,
                            c10::EventFlag /*flag*/) const {
  TORCH_CHECK(device < 0 || device == stream.device_index(), "sim: an event of device ", static_cast<int>(device),
              " is recorded on a stream of device ", static_cast<int>(stream.device_index()));
  if (*event == nullptr) *event = new Event;
  static_cast<Event*>(*event)->point = Simulation::get().record(stream);
}

void SimDeviceGuard::block(void* event, const c10::Stream& stream) const {
  if (event != nullptr) Simulation::get().block(stream, point_of(event));
}

bool SimDeviceGuard::queryEvent(void* event) const {
  return event == nullptr || Simulation::get().query(point_of(event));
}

void SimDeviceGuard::synchronizeEvent(void* event) const {
  if (event != nullptr) Simulation::get().wait(point_of(event));
}

double SimDeviceGuard::elapsedTime(void* first, void* second, c10::DeviceIndex /*device*/) const {
  TORCH_CHECK(first != nullptr && second != nullptr && point_of(first)->is_passed() && point_of(second)->is_passed(),
              "sim: both events have to be complete");
  return std::chrono::duration<double, std::milli>(point_of(second)->time() - point_of(first)->time()).count();
}

}  // namespace penstock::sim
