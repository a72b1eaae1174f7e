#include "penstock/transport/send_queue.h"

#include <ATen/ops/empty.h>

#include <cstring>

#include "penstock/transport/start_thread.h"
#include "penstock/transport/unprofiled.h"

namespace penstock::internal {
namespace {

// When more than this is under way, a send waits.
constexpr std::size_t kManySends = 128;
constexpr std::size_t kManyBytes = std::size_t{64} << 20U;

std::string text_of(const std::optional<TensorMeta>& meta) {
  return meta ? to_string(*meta) : "None";
}

// A receiver that expects something else must not get this: what is shorter would be taken for whole, and what is longer
// ends its process.
void require_expected(const std::vector<Packed>& parts, const Metas* expected, int to, Tag tag) {
  const std::string hint =
      "\n  Hint: with dynamic_shapes every message tells its shapes; without, they may change with the batch only.";
  if (expected == nullptr) {
    throw PipeliningShapeError(name_of(tag, "to", to) + " was not there in the step that the shapes were learnt in." +
                               hint);
  }
  if (parts.size() != expected->size()) {
    throw PipeliningShapeError(name_of(tag, "to", to) + " has " + std::to_string(parts.size()) + " tensors, and had " +
                               std::to_string(expected->size()) + " when the shapes were learnt." + hint);
  }
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].looks_like((*expected)[i])) continue;
    throw PipeliningShapeError("tensor " + std::to_string(i) + " of " + name_of(tag, "to", to) + " is " +
                               text_of(parts[i].meta()) + ", and was " + text_of((*expected)[i]) +
                               " when the shapes were learnt." + hint);
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

SendQueue::SendQueue(ControlChannel& control, DataBackends backends, Step& step)
    : control_(control), backends_(std::move(backends)), step_(step), reaper_(start_thread([this] { reap(); })) {}

SendQueue::~SendQueue() {
  stop();
  under_way_.clear();
}

void SendQueue::stop() {
  {
    const MonitorLock lock(monitor_);
    ending_ = true;
    monitor_.notify_all();
  }
  if (reaper_.joinable()) reaper_.join();
}

void SendQueue::begin_step() {
  for (auto& [key, channel] : channels_) {
    channel.headers = step_.at_begin();
    channel.learnt.begin_step();
  }
  headers_sent_ = false;
}

SendQueue::Channel& SendQueue::channel_of(int to, Tag tag) {
  const auto [found, is_new] = channels_.try_emplace({to, tag.channel});
  if (is_new) found->second.headers = step_.at_begin();
  return found->second;
}

void SendQueue::open(Channel& channel, int to, Tag tag) {
  channel.headers = step_.changed || channel.learnt.empty() ? Headers::On : Headers::Off;
  start(to, tag, MessageKind::Opening, std::string(1, static_cast<char>(channel.headers)));
}

void SendQueue::send(int to, Tag tag, const Message& message, Deadline deadline) {
  control_.throw_if_aborted();
  const std::vector<Packed> parts = packed(message);
  Channel& channel = channel_of(to, tag);
  if (channel.headers == Headers::Unknown) open(channel, to, tag);
  const Metas* expected = channel.learnt.next(tag.number);
  if (channel.headers == Headers::On) {
    send_with_header(channel, parts, expected, to, tag);
  } else {
    require_expected(parts, expected, to, tag);
    send_parts(parts, to, tag, MessageKind::Data);
  }

  MonitorLock lock(monitor_);
  if (is_much()) monitor_.notify_all();
  // With headers, data is taken when the message is and not when its receive is posted: two ranks could wait for one
  // another here, where the schedule says that they cannot.
  const auto is_too_much = [this] {
    return !under_way_.empty() && (under_way_.size() > kManySends || bytes_under_way_ > kManyBytes);
  };
  while (!headers_sent_ && is_too_much()) wait_here_for_oldest(lock, deadline);
}

void SendQueue::send_with_header(Channel& channel, const std::vector<Packed>& parts, const Metas* expected, int to,
                                 Tag tag) {
  headers_sent_ = true;
  if (expected != nullptr) {
    // For the receives that are posted already.
    std::vector<Packed> anything;
    for (const std::optional<TensorMeta>& meta : *expected) {
      anything.emplace_back(meta ? at::empty(meta->shape, meta->dtype) : at::Tensor());
    }
    send_parts(anything, to, tag, MessageKind::Data);
  }
  Metas metas;
  for (const Packed& part : parts) metas.push_back(part.meta());
  const HeaderBytes header = encode_header(metas);
  start(to, tag, MessageKind::Header, header.first);
  if (!header.rest.empty()) start(to, tag, MessageKind::FreshData, header.rest);
  send_parts(parts, to, tag, MessageKind::FreshData);
  if (step_.learns()) channel.learnt.add(tag.number, std::move(metas));
}

void SendQueue::send_parts(const std::vector<Packed>& parts, int to, Tag tag, MessageKind kind) {
  bool empty = true;
  for (const Packed& part : parts) {
    if (!part.tensor.defined() || part.tensor.numel() == 0) continue;
    start(to, tag, kind, bytes_of(part.tensor));
    empty = false;
  }
  // Something has to come.
  if (empty) start(to, tag, kind, std::string(1, '\0'));
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
    work = unprofiled([&] { return backends_[tag.channel % 2]->send(tensors, to, wire_tag(tag, kind)); });
  } catch (const c10::Error& error) {
    control_.throw_connection_lost(to, error);
  } catch (const std::runtime_error& error) {
    control_.throw_connection_lost(to, error);
  }
  const MonitorLock lock(monitor_);
  under_way_.push_back({.to = to, .bytes = bytes.nbytes(), .work = std::move(work)});
  bytes_under_way_ += bytes.nbytes();
}

bool SendQueue::is_much() const {
  return under_way_.size() > kReapSends || bytes_under_way_ > kReapBytes;
}

void SendQueue::wait_for_oldest(MonitorLock& lock, Deadline deadline) {
  const Sent oldest = std::move(under_way_.front());
  under_way_.pop_front();
  ++waited_for_;
  lock.unlock();
  const auto end = [&](bool taken) {
    lock.lock();
    --waited_for_;
    if (taken) {
      bytes_under_way_ -= oldest.bytes;
    } else {
      under_way_.push_front(oldest);
    }
    monitor_.notify_all();
  };
  try {
    control_.wait(*oldest.work, deadline, oldest.to, "no receive was posted on rank " + std::to_string(oldest.to));
  } catch (...) {
    end(false);
    throw;
  }
  end(true);
}

void SendQueue::wait_here_for_oldest(MonitorLock& lock, Deadline deadline) {
  step_.waiting_for.store(under_way_.front().to, std::memory_order_relaxed);
  wait_for_oldest(lock, deadline);
  step_.waiting_for.store(TransportError::kNoPeer, std::memory_order_relaxed);
}

void SendQueue::drain(Deadline deadline) {
  control_.throw_if_aborted();
  MonitorLock lock(monitor_);
  while (!under_way_.empty()) wait_here_for_oldest(lock, deadline);
  // The one that the reaper has.
  const WaitResult waited = monitor_.wait(deadline, [this] { return waited_for_ == 0; });
  // It gives it back when it fails.
  while (!under_way_.empty()) wait_here_for_oldest(lock, deadline);
  if (waited == WaitResult::Timeout) {
    throw TransportError(TransportError::Why::Timeout, TransportError::kNoPeer,
                         "not all that was sent was taken within the deadline");
  }
}

void SendQueue::reap() {
  MonitorLock lock(monitor_);
  for (;;) {
    monitor_.wait(Deadline::max(), [this] { return ending_ || (is_much() && !under_way_.empty()); });
    if (ending_) return;
    try {
      wait_for_oldest(lock, Deadline::max());
    } catch (const TransportError&) {
      return;
    }
  }
}

}  // namespace penstock::internal
