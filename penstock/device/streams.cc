#include "penstock/device/streams.h"

#include <c10/core/DeviceType.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

namespace penstock::internal {
namespace {

using c10::impl::VirtualGuardImpl;

// Times between two looks at an event. Copies of small messages take microseconds, and a wait that takes longer should
// not keep a core busy.
constexpr std::chrono::microseconds kFirstPause{5};
constexpr std::chrono::microseconds kLongestPause{500};

thread_local const RankStreams* current_streams = nullptr;

}  // namespace

bool has_streams(at::Device device) {
  return !device.is_cpu() && !device.is_meta() && c10::impl::hasDeviceGuardImpl(device.type());
}

at::Device with_index(at::Device device) {
  if (!has_streams(device) || device.has_index()) return device;
  return VirtualGuardImpl(device.type()).getDevice();
}

c10::Stream current_stream(at::Device device) {
  return VirtualGuardImpl(device.type()).getStream(with_index(device));
}

c10::Stream default_stream(at::Device device) {
  return VirtualGuardImpl(device.type()).getDefaultStream(with_index(device));
}

c10::Stream stream_of_pool(at::Device device) {
  const VirtualGuardImpl guard(device.type());
  try {
    return guard.getStreamFromGlobalPool(device, /*isHighPriority=*/false);
  } catch (const c10::Error&) {
    return default_stream(device);
  }
}

void synchronize_device(at::Device device) {
  if (has_streams(device)) VirtualGuardImpl(device.type()).synchronizeDevice(with_index(device).index());
}

void use_on_stream(const at::Tensor& tensor, const c10::Stream& stream) {
  if (!tensor.defined() || !tensor.has_storage() || !has_streams(tensor.device())) return;
  VirtualGuardImpl(stream.device_type()).recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

void use_on_stream(const at::Tensor& tensor) {
  if (tensor.defined() && has_streams(tensor.device())) use_on_stream(tensor, current_stream(tensor.device()));
}

StreamPoint StreamPoint::after(const c10::Stream& stream) {
  StreamPoint point;
  auto event = std::make_shared<c10::Event>(stream.device_type());
  event->record(stream);
  point.events_.push_back(std::move(event));
  return point;
}

StreamPoint StreamPoint::now(std::span<const at::Device> devices) {
  StreamPoint point;
  for (const at::Device device : devices) {
    if (has_streams(device)) point.add(after(current_stream(device)));
  }
  return point;
}

void StreamPoint::add(const StreamPoint& other) {
  events_.insert(events_.end(), other.events_.begin(), other.events_.end());
}

void StreamPoint::block(const c10::Stream& stream) const {
  for (const auto& event : events_) event->block(stream);
}

void StreamPoint::block(std::span<const at::Device> devices) const {
  if (events_.empty()) return;
  for (const at::Device device : devices) {
    if (has_streams(device)) block(current_stream(device));
  }
}

bool StreamPoint::is_reached() const {
  return std::ranges::all_of(events_, [](const auto& event) { return event->query(); });
}

bool wait_for(const c10::Event& event, Deadline deadline) {
  auto pause = kFirstPause;
  while (!event.query()) {
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
  return true;
}

bool StreamPoint::wait(Deadline deadline) const {
  return std::ranges::all_of(events_, [&](const auto& event) { return wait_for(*event, deadline); });
}

RankStreams::RankStreams(const std::vector<at::Device>& devices) {
  for (const at::Device given : devices) {
    if (!has_streams(given)) continue;
    const at::Device device = with_index(given);
    if (std::ranges::find(devices_, device) != devices_.end()) continue;
    devices_.push_back(device);
    streams_.push_back(stream_of_pool(device));
  }
}

StreamPoint RankStreams::point_after() const {
  StreamPoint point;
  for (const c10::Stream& stream : streams_) point.add(StreamPoint::after(stream));
  return point;
}

RankStreams::Scope::Scope(const RankStreams& streams) : outer_(std::exchange(current_streams, &streams)) {
  if (streams.devices_.empty()) return;
  device_.emplace(streams.devices_.front());
  streams_.emplace(streams.streams_);
}

RankStreams::Scope::~Scope() {
  current_streams = outer_;
}

std::span<const at::Device> RankStreams::devices_of_thread() {
  return current_streams == nullptr ? std::span<const at::Device>() : std::span(current_streams->devices_);
}

}  // namespace penstock::internal
