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

std::shared_ptr<const DeviceClock> DeviceClock::recent(at::Device device, Deadline deadline) {
  // An event tells milliseconds as a float, which is precise to a microsecond for some ten seconds.
  constexpr std::chrono::seconds kLife{10};
  static std::mutex mutex;
  static auto& clocks = *new std::map<std::pair<at::DeviceType, at::DeviceIndex>, std::shared_ptr<const DeviceClock>>;
  const std::pair key{device.type(), device.index()};
  {
    const std::lock_guard lock(mutex);
    const auto found = clocks.find(key);
    if (found != clocks.end() && Clock::now() - found->second->host_now_ <= kLife) return found->second;
  }
  TimedEvent now = timed_event(current_stream(device));
  if (!wait_for(*now, deadline)) return nullptr;
  const std::shared_ptr<const DeviceClock> clock(new DeviceClock(std::move(now), Clock::now()));
  const std::lock_guard lock(mutex);
  return clocks[key] = clock;
}

Clock::time_point DeviceClock::time_of(const c10::Event& event, bool is_later) const {
  const std::chrono::duration<double, std::milli> between(is_later ? now_->elapsedTime(event)
                                                                   : event.elapsedTime(*now_));
  const auto difference = std::chrono::duration_cast<Clock::duration>(between);
  return is_later ? host_now_ + difference : host_now_ - difference;
}

}  // namespace penstock::internal
