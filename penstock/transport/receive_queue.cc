#include "penstock/transport/receive_queue.h"

#include <c10/core/GradMode.h>

#include <stdexcept>
#include <string>
#include <string_view>

#include "penstock/transport/unprofiled.h"

namespace penstock::internal {
namespace {

std::string_view text_of(const at::Tensor& bytes) {
  return {static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes()};
}

}  // namespace

ReceiveQueue::Channel& ReceiveQueue::channel_of(int from, Tag tag) {
  const auto [found, is_new] = channels_.try_emplace({from, tag.channel});
  if (is_new) found->second.headers = step_.at_begin();
  return found->second;
}

void ReceiveQueue::begin_step() {
  ended_.clear();
  for (auto& [key, channel] : channels_) {
    if (!channel.incoming.empty()) {
      throw std::logic_error(
          name_of({.channel = key.second, .number = channel.incoming.begin()->first}, "from", key.first) +
          " was posted and not received before the next step.");
    }
    channel.headers = step_.at_begin();
    channel.learnt.begin_step();
  }
}

void ReceiveQueue::post(int from, Tag tag) {
  control_.throw_if_aborted();
  ended_.clear();
  Channel& channel = channel_of(from, tag);
  if (channel.headers == Headers::Unknown && !channel.opening.work) {
    channel.opening = post(from, tag, MessageKind::Opening, pool_->empty_bytes(1));
  }
  Incoming incoming;
  if (const Metas* metas = channel.learnt.next(tag.number))
    incoming.expected = post_data(*metas, from, tag, MessageKind::Data);
  if (channel.headers == Headers::On) post_header(incoming, from, tag);
  channel.incoming[tag.number].push_back(std::move(incoming));
}

void ReceiveQueue::post_header(Incoming& incoming, int from, Tag tag) {
  incoming.header = post(from, tag, MessageKind::Header, pool_->empty_bytes(kHeaderBytes));
}

ReceiveQueue::Posted ReceiveQueue::post(int from, Tag tag, MessageKind kind, const at::Tensor& bytes) {
  std::vector<at::Tensor> tensors{bytes};
  try {
    return {.bytes = bytes,
            .work = unprofiled([&] { return backends_[tag.channel % 2]->recv(tensors, from, wire_tag(tag, kind)); })};
  } catch (const c10::Error& error) {
    control_.throw_connection_lost(from, error);
  } catch (const std::runtime_error& error) {
    control_.throw_connection_lost(from, error);
  }
}

ReceiveQueue::Arrival ReceiveQueue::post_data(const Metas& metas, int from, Tag tag, MessageKind kind) {
  Arrival arrival;
  for (const std::optional<TensorMeta>& meta : metas) {
    at::Tensor& tensor = arrival.tensors.emplace_back();
    if (!meta) continue;
    tensor = pool_->empty(meta->shape, meta->strides, meta->dtype);
    if (tensor.numel() > 0) arrival.data.push_back(post(from, tag, kind, bytes_of(tensor)));
    if (meta->requires_grad) tensor.set_requires_grad(true);
  }
  if (arrival.data.empty()) arrival.data.push_back(post(from, tag, kind, pool_->empty_bytes(1)));
  return arrival;
}

void ReceiveQueue::wait(Posted& posted, int from, Deadline deadline) {
  step_.waiting_for.store(from, std::memory_order_relaxed);
  control_.wait(*posted.work, deadline, from, "no message came from rank " + std::to_string(from));
  step_.waiting_for.store(TransportError::kNoPeer, std::memory_order_relaxed);
  ended_.push_back({.bytes = {}, .work = std::move(posted.work)});
}

void ReceiveQueue::wait(Arrival& arrival, int from, Deadline deadline) {
  while (!arrival.data.empty()) {
    wait(arrival.data.front(), from, deadline);
    arrival.data.pop_front();
  }
}

void ReceiveQueue::read_opening(Channel& channel, int from, Tag tag, Deadline deadline) {
  wait(channel.opening, from, deadline);
  channel.headers = static_cast<Headers>(text_of(channel.opening.bytes).front());
  channel.opening = {};
  if (channel.headers != Headers::On) return;
  step_.changed = true;
  // These were posted before it was known.
  for (auto& [number, all] : channel.incoming) {
    for (Incoming& incoming : all) post_header(incoming, from, {.channel = tag.channel, .number = number});
  }
}

void ReceiveQueue::read_header(Channel& channel, Incoming& incoming, int from, Tag tag, Deadline deadline) {
  if (incoming.header.work) wait(incoming.header, from, deadline);
  const std::size_t rest = rest_of_header(text_of(incoming.header.bytes));
  if (rest > 0) {
    if (!incoming.long_header.bytes.defined()) {
      incoming.long_header = post(from, tag, MessageKind::FreshData, pool_->empty_bytes(rest));
    }
    if (incoming.long_header.work) wait(incoming.long_header, from, deadline);
  }
  Metas metas = decode_header(text_of(incoming.header.bytes),
                              rest > 0 ? text_of(incoming.long_header.bytes) : std::string_view());
  incoming.fresh = post_data(metas, from, tag, MessageKind::FreshData);
  if (step_.learns()) channel.learnt.add(tag.number, std::move(metas));
}

Message ReceiveQueue::receive(int from, Tag tag, Deadline deadline) {
  control_.throw_if_aborted();
  ended_.clear();
  Channel& channel = channel_of(from, tag);
  if (!channel.incoming.contains(tag.number)) post(from, tag);
  if (channel.headers == Headers::Unknown) read_opening(channel, from, tag, deadline);
  const auto lane = channel.incoming.find(tag.number);
  Incoming& incoming = lane->second.front();
  if (channel.headers == Headers::Off && !incoming.expected) {
    throw PipeliningShapeError(name_of(tag, "from", from) +
                               " was not there in the step that the shapes were learnt in.\n  Hint: with "
                               "dynamic_shapes every message tells its shapes.");
  }
  if (incoming.expected) wait(*incoming.expected, from, deadline);
  if (channel.headers == Headers::On) {
    if (!incoming.fresh) read_header(channel, incoming, from, tag, deadline);
    wait(*incoming.fresh, from, deadline);
  }
  Message message = std::move((incoming.fresh ? incoming.fresh : incoming.expected)->tensors);
  lane->second.pop_front();
  if (lane->second.empty()) channel.incoming.erase(lane);
  return message;
}

}  // namespace penstock::internal
