#include "penstock/device/device_span.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <chrono>
#include <map>
#include <mutex>

#include "penstock/device/streams.h"

namespace penstock::internal {
namespace {

thread_local TransferLog* current_log = nullptr;

}  // namespace

TimedEvent timed_event(const c10::Stream& stream) {
  auto event = std::make_shared<c10::Event>(stream.device_type(), c10::EventFlag::BACKEND_DEFAULT);
  event->record(stream);
  return event;
}

DeviceSpan DeviceSpan::begin(const c10::Stream& stream) {
  DeviceSpan span;
  span.began_ = timed_event(stream);
  return span;
}

void DeviceSpan::end(const c10::Stream& stream) {
  ended_ = timed_event(stream);
}

std::optional<c10::Stream> observing_stream(at::Device device) {
  try {
    return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

TransferLog::TransferLog() {
  current_log = this;
}

TransferLog::~TransferLog() {
  current_log = nullptr;
}

void TransferLog::add(const DeviceSpan& span) {
  if (current_log != nullptr) current_log->spans_.push_back(span);
}

DeviceClock::DeviceClock(at::Device device) : now_(timed_event(current_stream(device))) {
  now_->synchronize();
  host_now_ = Clock::now();
}

std::shared_ptr<const DeviceClock> DeviceClock::recent(at::Device device) {
  // An event tells milliseconds as a float, which is precise to a microsecond for some ten seconds.
  constexpr std::chrono::seconds kLife{10};
  static std::mutex mutex;
  static auto& clocks = *new std::map<std::pair<at::DeviceType, at::DeviceIndex>, std::shared_ptr<const DeviceClock>>;
  const std::lock_guard lock(mutex);
  std::shared_ptr<const DeviceClock>& clock = clocks[{device.type(), device.index()}];
  if (!clock || Clock::now() - clock->host_now_ > kLife) clock = std::make_shared<const DeviceClock>(device);
  return clock;
}

Clock::time_point DeviceClock::time_of(const c10::Event& event, bool is_later) const {
  if (!event.query()) event.synchronize();
  const std::chrono::duration<double, std::milli> between(is_later ? now_->elapsedTime(event)
                                                                   : event.elapsedTime(*now_));
  const auto difference = std::chrono::duration_cast<Clock::duration>(between);
  return is_later ? host_now_ + difference : host_now_ - difference;
}

}  // namespace penstock::internal
