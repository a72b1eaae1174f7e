#include "penstock/transport/send_queue.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <stdexcept>

#include "penstock/base/text.h"
#include "penstock/device/device_span.h"
#include "penstock/device/host_copies.h"
#include "penstock/device/streams.h"
#include "penstock/transport/start_thread.h"
#include "penstock/transport/unprofiled.h"

namespace penstock::internal {
namespace {

// send() blocks while more than this is in flight.
constexpr std::size_t kMostSends = 128;
constexpr std::size_t kMostBytes = std::size_t{64} << 20U;
// So many tensors of devices may be on their way whatever their size: the host would otherwise wait for its device after
// each large message.
constexpr std::size_t kFewSends = 4;

std::string no_receive_on(int rank) {
  return concat("no receive was posted on rank ", rank);
}

std::string text_of(const std::optional<TensorMeta>& meta) {
  return meta ? to_string(*meta) : "None";
}

// Throws unless the message has the shapes that the receiver has posted its receives with: a shorter message would be
// taken for a complete one, and a longer one would end the receiver's process.
void require_expected(const std::vector<Packed>& parts, const Metas* expected, int to, Tag tag) {
  constexpr const char* kHint =
      "\n  Hint: set dynamic_shapes to send shapes with every message; otherwise they may change only when the batch's "
      "do.";
  const auto name = [&] { return name_of(tag, "to", to); };
  if (expected == nullptr) {
    throw PipeliningShapeError(concat(name(), " was not sent in the step whose shapes are cached.", kHint));
  }
  if (parts.size() != expected->size()) {
    throw PipeliningShapeError(concat(name(), " has ", parts.size(), " tensors, expected ", expected->size(),
                                      " as in the step whose shapes are cached.", kHint));
  }
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].matches((*expected)[i])) continue;
    throw PipeliningShapeError(concat("tensor ", i, " of ", name(), " is ", text_of(parts[i].meta()), ", expected ",
                                      text_of((*expected)[i]), " as in the step whose shapes are cached.", kHint));
  }
}

// Throws UnsendableTensor before anything is sent.
std::vector<Packed> packed(const Message& message) {
  std::vector<Packed> parts;
  parts.reserve(message.size());
  for (std::size_t i = 0; i < message.size(); ++i) {
    if (const std::string why = why_unsendable(message[i]); !why.empty()) throw UnsendableTensor(i, why);
    parts.emplace_back(message[i]);
  }
  return parts;
}

}  // namespace

SendQueue::SendQueue(ControlChannel& control, DataBackends& backends, TransportStep& step, DirectLinks& links,
                     DeviceOperations& operations)
    : control_(control),
      backends_(backends),
      step_(step),
      links_(links),
      operations_(operations),
      reaper_(start_thread([this] { reap(); })) {}

SendQueue::~SendQueue() {
  stop();
  in_flight_.clear();
}

void SendQueue::stop() {
  {
    const MonitorLock lock(monitor_);
    ending_ = true;
    monitor_.notify_all();
  }
  if (reaper_.joinable()) reaper_.join();
  staging_.stop();
}

void SendQueue::begin_step() {
  for (auto& [key, channel] : channels_) {
    channel.headers = step_.initial_headers();
    channel.shapes.begin_step();
  }
  for (auto& [key, channel] : direct_channels_) {
    channel.headers = Headers::Unknown;
    channel.shapes.begin_step();
  }
  headers_sent_ = false;
  const MonitorLock lock(monitor_);
  profilers_ = c10::ThreadLocalDebugInfo::current();
}

SendQueue::Channel& SendQueue::channel_of(int to, Tag tag) {
  const auto [found, is_new] = channels_.try_emplace({to, tag.channel});
  if (is_new) found->second.headers = step_.initial_headers();
  return found->second;
}

void SendQueue::open(Channel& channel) const {
  const bool has_headers = step_.changed || step_.dynamic_shapes || channel.shapes.empty();
  channel.headers = has_headers ? Headers::On : Headers::Off;
}

void SendQueue::send(int to, Tag tag, const Message& message, Deadline deadline) {
  control_.throw_if_aborted();
  const Clock::duration timeout = deadline - Clock::now();
  std::vector<Packed> parts = packed(message);
  if (DirectLink* const link = links_.to(to, tag)) {
    send_directly(*link, tag, std::move(parts));
    if (headers_sent_) return;
    operations_.limit_sends(to, tag.channel % 2, {.least = kFewSends, .most = kMostSends, .bytes = kMostBytes},
                            step_.waiting_for, deadline);
    return control_.throw_if_aborted();
  }
  Channel& channel = channel_of(to, tag);
  if (channel.headers == Headers::Unknown) {
    open(channel);
    start(to, tag, MessageKind::Opening, std::string(1, static_cast<char>(channel.headers)));
  }
  const Metas* expected = channel.shapes.next(tag.number);
  if (channel.headers == Headers::On) {
    send_with_header(channel, parts, expected, to, tag);
  } else {
    require_expected(parts, expected, to, tag);
    send_parts(parts, to, tag, MessageKind::Data);
  }

  const MonitorLock lock(monitor_);
  if (needs_reaping()) monitor_.notify_all();
  // With headers, the receiver posts receives of the data when it receives the message, not when it posts it.
  // Backpressure could then deadlock two ranks that the verified schedule keeps free of deadlock.
  while (!headers_sent_ && is_over_limit()) {
    if (in_flight_.empty()) {
      wait_for_staged(timeout);
      deadline = Clock::now() + timeout;
    } else {
      wait_for_oldest_on_rank_thread(deadline);
    }
  }
}

void SendQueue::send_with_header(Channel& channel, const std::vector<Packed>& parts, const Metas* expected, int to,
                                 Tag tag) {
  headers_sent_ = true;
  if (expected != nullptr) {
    // The receiver has posted receives of the cached shapes.
    std::vector<Packed> filler;
    for (const std::optional<TensorMeta>& meta : *expected) {
      filler.emplace_back(meta ? at::empty(meta->shape, meta->dtype) : at::Tensor());
    }
    send_parts(filler, to, tag, MessageKind::Data);
  }
  send_header(channel, parts, to, tag);
  send_parts(parts, to, tag, MessageKind::FreshData);
}

void SendQueue::send_header(Channel& channel, const std::vector<Packed>& parts, int to, Tag tag) {
  Metas metas;
  for (const Packed& part : parts) metas.push_back(part.meta());
  const HeaderBytes header = encode_header(metas);
  start(to, tag, MessageKind::Header, header.first);
  if (!header.rest.empty()) start(to, tag, MessageKind::FreshData, header.rest);
  if (step_.caches_shapes()) channel.shapes.add(tag.number, std::move(metas));
}

void SendQueue::send_directly(DirectLink& link, Tag tag, std::vector<Packed> parts) {
  if (link.place_of(tag) != link.position) {
    throw std::logic_error(concat(name_of(tag, "to", link.peer), " is sent as number ", link.position + 1,
                                  " of its step, expected ", link.place_of(tag) + 1, " as in the order of messages."));
  }
  Channel& channel =
      direct_channels_.try_emplace({link.peer, tag.channel}, Channel{Headers::Unknown, {}}).first->second;
  if (channel.headers == Headers::Unknown) {
    open(channel);
    start(link.peer, tag, MessageKind::Opening,
          encode_direct_opening({.headers = channel.headers, .digest = link.digest}));
  }
  // A stage may return tensors on another device than its own.
  for (Packed& part : parts) {
    if (!part.tensor.defined() || part.tensor.device() == link.device) continue;
    const StreamPoint computed = StreamPoint::now(part.tensor.device());
    part.tensor = DeviceCopy(part.tensor, link.device, computed, copies_).take(Deadline::max());
  }
  if (channel.headers == Headers::On) {
    headers_sent_ = true;
    send_header(channel, parts, link.peer, tag);
  } else {
    require_expected(parts, channel.shapes.next(tag.number), link.peer, tag);
  }
  DeviceOperation sent{.peer = link.peer, .what = no_receive_on(link.peer), .tag = tag};
  DeviceSpan span = link.begin_span(current_stream(link.device));
  for (const Packed& part : parts) {
    if (!part.tensor.defined() || part.tensor.numel() == 0) continue;
    std::vector<at::Tensor> bytes{bytes_of(part.tensor)};
    try {
      sent.works.push_back(unprofiled([&] { return link.backend->send(bytes, DirectLink::kReceiver, /*tag=*/0); }));
    } catch (const std::exception& error) {
      control_.throw_connection_lost(link.peer, error);
    }
    // The work does not keep the memory until it has completed.
    sent.tensors.push_back(part.tensor);
  }
  ++link.position;
  if (sent.works.empty()) return;
  span = link.end_span(std::move(span), sent.works);
  if (!span.empty()) TransferLog::add(span);
  operations_.add(std::move(sent));
}

void SendQueue::send_parts(const std::vector<Packed>& parts, int to, Tag tag, MessageKind kind) {
  const auto is_on_device = [](const Packed& part) { return part.tensor.defined() && !part.tensor.is_cpu(); };
  if (std::ranges::any_of(parts, is_on_device)) return stage_parts(parts, to, tag, kind);
  bool is_empty = true;
  for (const Packed& part : parts) {
    if (!part.tensor.defined() || part.tensor.numel() == 0) continue;
    start(to, tag, kind, bytes_of(part.tensor));
    is_empty = false;
  }
  // The receiver expects at least one send, so send a single byte.
  if (is_empty) start(to, tag, kind, std::string(1, '\0'));
}

void SendQueue::stage_parts(const std::vector<Packed>& parts, int to, Tag tag, MessageKind kind) {
  // All parts are staged, as the receiver takes them in order.
  std::vector<at::Tensor> tensors;
  StreamPoint copied;
  for (const Packed& part : parts) {
    if (!part.tensor.defined() || part.tensor.numel() == 0) continue;
    tensors.push_back(copy_to_host(part.tensor, copies_, copied));
  }
  if (tensors.empty()) tensors.push_back(at::zeros({1}, at::kByte));
  {
    const MonitorLock lock(monitor_);
    staged_ += tensors.size();
    for (const at::Tensor& tensor : tensors) staged_bytes_ += tensor.nbytes();
  }
  staging_.add(std::move(copied), [this, to, tag, kind, tensors = std::move(tensors)] {
    for (const at::Tensor& tensor : tensors) {
      start(to, tag, kind, bytes_of(tensor));
      const MonitorLock lock(monitor_);
      --staged_;
      staged_bytes_ -= tensor.nbytes();
      monitor_.notify_all();
    }
  });
}

void SendQueue::wait_for_staging(Clock::duration timeout) {
  const MonitorLock lock(monitor_);
  while (staged_ > 0) wait_for_staged(timeout);
}

void SendQueue::wait_for_staged(Clock::duration timeout) {
  const Deadline deadline = Clock::now() + std::clamp<Clock::duration>(timeout, Clock::duration::zero(), kForever);
  const std::size_t before = staged_;
  const auto has_progressed = [&]() PENSTOCK_REQUIRES(monitor_) { return staged_ < before; };
  // An abort does not wake this wait, nor does an error of the thread.
  while (monitor_.wait(std::min(deadline, Clock::now() + StagingThread::kPause), has_progressed) != WaitResult::Ready) {
    monitor_.unlock();
    std::exception_ptr error;
    try {
      staging_.throw_if_failed();
      control_.throw_if_aborted();
      if (Clock::now() >= deadline) {
        throw TransportError(TransportError::Why::Timeout, TransportError::kNoPeer,
                             "a device has not computed a message within the deadline");
      }
    } catch (...) {
      error = std::current_exception();
    }
    monitor_.lock();
    if (error) std::rethrow_exception(error);
  }
}

void SendQueue::start(int to, Tag tag, MessageKind kind, const std::string& bytes) {
  const at::Tensor tensor = at::empty({static_cast<std::int64_t>(bytes.size())}, at::kByte);
  std::memcpy(tensor.data_ptr(), bytes.data(), bytes.size());
  start(to, tag, kind, tensor);
}

void SendQueue::start(int to, Tag tag, MessageKind kind, const at::Tensor& bytes) {
  std::vector<at::Tensor> tensors{bytes};
  c10::intrusive_ptr<c10d::Work> work;
  try {
    const MutexLock lock(backends_.mutex);
    work = unprofiled([&] { return backends_.of(tag).send(tensors, to, wire_tag(tag, kind)); });
  } catch (const c10::Error& error) {
    control_.throw_connection_lost(to, error);
  } catch (const std::runtime_error& error) {
    control_.throw_connection_lost(to, error);
  }
  const MonitorLock lock(monitor_);
  in_flight_.push_back({.to = to, .bytes = bytes.nbytes(), .work = std::move(work)});
  bytes_in_flight_ += bytes.nbytes();
}

bool SendQueue::needs_reaping() const {
  return in_flight_.size() > kReapSends || bytes_in_flight_ > kReapBytes;
}

bool SendQueue::is_over_limit() const {
  if (staged_ > kFewSends && bytes_in_flight_ + staged_bytes_ > kMostBytes) return true;
  if (in_flight_.size() + staged_ > kMostSends) return true;
  return !in_flight_.empty() && bytes_in_flight_ > kMostBytes;
}

void SendQueue::wait_for_oldest(Deadline deadline) {
  const Sent oldest = std::move(in_flight_.front());
  in_flight_.pop_front();
  ++waited_for_;
  monitor_.unlock();
  std::exception_ptr error;
  try {
    control_.wait(*oldest.work, deadline, oldest.to, no_receive_on(oldest.to));
  } catch (...) {
    error = std::current_exception();
  }
  monitor_.lock();
  --waited_for_;
  if (error) {
    in_flight_.push_front(oldest);
  } else {
    bytes_in_flight_ -= oldest.bytes;
  }
  monitor_.notify_all();
  if (error) std::rethrow_exception(error);
}

void SendQueue::wait_for_oldest_on_rank_thread(Deadline deadline) {
  step_.waiting_for.store(in_flight_.front().to, std::memory_order_relaxed);
  wait_for_oldest(deadline);
  step_.waiting_for.store(TransportError::kNoPeer, std::memory_order_relaxed);
}

void SendQueue::drain(Deadline deadline) {
  control_.throw_if_aborted();
  const Clock::duration timeout = deadline - Clock::now();
  wait_for_staging(timeout);
  // The ranks have the time from when the device has computed what they receive.
  deadline = Clock::now() + timeout;
  const MonitorLock lock(monitor_);
  while (!in_flight_.empty()) wait_for_oldest_on_rank_thread(deadline);
  // The reaper may be waiting for one more send, and puts it back if its wait fails.
  const WaitResult result = monitor_.wait(deadline, [this]() PENSTOCK_REQUIRES(monitor_) { return waited_for_ == 0; });
  while (!in_flight_.empty()) wait_for_oldest_on_rank_thread(deadline);
  profilers_.reset();
  if (result == WaitResult::Timeout) {
    throw TransportError(TransportError::Why::Timeout, TransportError::kNoPeer,
                         "not all messages were received within the deadline");
  }
}

void SendQueue::reap() {
  const MonitorLock lock(monitor_);
  for (;;) {
    monitor_.wait(Deadline::max(),
                  [this]() PENSTOCK_REQUIRES(monitor_) { return ending_ || (needs_reaping() && !in_flight_.empty()); });
    if (ending_) return;
    c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(profilers_);
    try {
      wait_for_oldest(Deadline::max());
    } catch (const TransportError&) {
      return;
    }
    c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(nullptr);
  }
}

}  // namespace penstock::internal
