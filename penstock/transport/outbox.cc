#include "penstock/transport/outbox.h"

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

Outbox::Outbox(Control& control, DataBackends backends, Step& step)
    : control_(control), backends_(std::move(backends)), step_(step), reaper_(start_thread([this] { reap(); })) {}

Outbox::~Outbox() {
  stop();
  under_way_.clear();
}

void Outbox::stop() {
  {
    const Gate::Lock lock = gate_.lock();
    ending_ = true;
    gate_.changed();
  }
  if (reaper_.joinable()) reaper_.join();
}

void Outbox::begin_step() {
  for (auto& [key, channel] : channels_) {
    channel.headers = step_.at_begin();
    channel.learnt.begin_step();
  }
  headers_sent_ = false;
}

Outbox::Channel& Outbox::channel_of(int to, Tag tag) {
  const auto [found, is_new] = channels_.try_emplace({to, tag.channel});
  if (is_new) found->second.headers = step_.at_begin();
  return found->second;
}

void Outbox::open(Channel& channel, int to, Tag tag) {
  channel.headers = step_.changed || channel.learnt.empty() ? Headers::On : Headers::Off;
  start(to, tag, Kind::Opening, std::string(1, static_cast<char>(channel.headers)));
}

void Outbox::send(int to, Tag tag, const Message& message, Deadline deadline) {
  control_.require_well();
  const std::vector<Packed> parts = packed(message);
  Channel& channel = channel_of(to, tag);
  if (channel.headers == Headers::Unsaid) open(channel, to, tag);
  const Metas* expected = channel.learnt.next(tag.number);
  if (channel.headers == Headers::On) {
    send_with_header(channel, parts, expected, to, tag);
  } else {
    require_expected(parts, expected, to, tag);
    send_parts(parts, to, tag, Kind::Data);
  }

  Gate::Lock lock = gate_.lock();
  if (is_much()) gate_.changed();
  // With headers, data is taken when the message is and not when its receive is posted: two ranks could wait for one
  // another here, where the schedule says that they cannot.
  const auto is_too_much = [this] {
    return !under_way_.empty() && (under_way_.size() > kManySends || bytes_under_way_ > kManyBytes);
  };
  while (!headers_sent_ && is_too_much()) wait_here_for_oldest(lock, deadline);
}

void Outbox::send_with_header(Channel& channel, const std::vector<Packed>& parts, const Metas* expected, int to,
                              Tag tag) {
  headers_sent_ = true;
  if (expected != nullptr) {
    // For the receives that are posted already.
    std::vector<Packed> anything;
    for (const std::optional<TensorMeta>& meta : *expected) {
      anything.emplace_back(meta ? at::empty(meta->shape, meta->dtype) : at::Tensor());
    }
    send_parts(anything, to, tag, Kind::Data);
  }
  Metas metas;
  for (const Packed& part : parts) metas.push_back(part.meta());
  const HeaderBytes header = encode_header(metas);
  start(to, tag, Kind::Header, header.first);
  if (!header.rest.empty()) start(to, tag, Kind::FreshData, header.rest);
  send_parts(parts, to, tag, Kind::FreshData);
  if (step_.learns()) channel.learnt.add(tag.number, std::move(metas));
}

void Outbox::send_parts(const std::vector<Packed>& parts, int to, Tag tag, Kind kind) {
  bool empty = true;
  for (const Packed& part : parts) {
    if (!part.tensor.defined() || part.tensor.numel() == 0) continue;
    start(to, tag, kind, bytes_of(part.tensor));
    empty = false;
  }
  // Something has to come.
  if (empty) start(to, tag, kind, std::string(1, '\0'));
}

void Outbox::start(int to, Tag tag, Kind kind, const std::string& bytes) {
  const at::Tensor tensor = at::empty({static_cast<std::int64_t>(bytes.size())}, at::kByte);
  std::memcpy(tensor.data_ptr(), bytes.data(), bytes.size());
  start(to, tag, kind, tensor);
}

void Outbox::start(int to, Tag tag, Kind kind, const at::Tensor& bytes) {
  std::vector<at::Tensor> tensors{bytes};
  c10::intrusive_ptr<c10d::Work> work;
  try {
    work = unprofiled([&] { return backends_[tag.channel % 2]->send(tensors, to, wire_tag(tag, kind)); });
  } catch (const c10::Error& error) {
    control_.connection_broke(to, error);
  } catch (const std::runtime_error& error) {
    control_.connection_broke(to, error);
  }
  const Gate::Lock lock = gate_.lock();
  under_way_.push_back({.to = to, .bytes = bytes.nbytes(), .work = std::move(work)});
  bytes_under_way_ += bytes.nbytes();
}

bool Outbox::is_much() const {
  return under_way_.size() > kFewSends || bytes_under_way_ > kFewBytes;
}

void Outbox::wait_for_oldest(Gate::Lock& lock, Deadline deadline) {
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
    gate_.changed();
  };
  try {
    control_.wait(*oldest.work, deadline, oldest.to, "no receive was posted on rank " + std::to_string(oldest.to));
  } catch (...) {
    end(false);
    throw;
  }
  end(true);
}

void Outbox::wait_here_for_oldest(Gate::Lock& lock, Deadline deadline) {
  step_.waiting_for.store(under_way_.front().to, std::memory_order_relaxed);
  wait_for_oldest(lock, deadline);
  step_.waiting_for.store(TransportError::kNobody, std::memory_order_relaxed);
}

void Outbox::drain(Deadline deadline) {
  control_.require_well();
  Gate::Lock lock = gate_.lock();
  while (!under_way_.empty()) wait_here_for_oldest(lock, deadline);
  // The one that the reaper has.
  const Waited waited = gate_.wait(lock, deadline, [this] { return waited_for_ == 0; });
  // It gives it back when it fails.
  while (!under_way_.empty()) wait_here_for_oldest(lock, deadline);
  if (waited == Waited::Late) {
    throw TransportError(TransportError::Why::Late, TransportError::kNobody,
                         "not all that was sent was taken within the deadline");
  }
}

void Outbox::reap() {
  Gate::Lock lock = gate_.lock();
  for (;;) {
    gate_.wait(lock, Deadline::max(), [this] { return ending_ || (is_much() && !under_way_.empty()); });
    if (ending_) return;
    try {
      wait_for_oldest(lock, Deadline::max());
    } catch (const TransportError&) {
      return;
    }
  }
}

}  // namespace penstock::internal
