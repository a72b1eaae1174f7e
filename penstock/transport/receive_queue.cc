#include "penstock/transport/receive_queue.h"

#include <stdexcept>
#include <string>
#include <string_view>

#include "penstock/base/text.h"
#include "penstock/transport/unprofiled.h"

namespace penstock::internal {
namespace {

std::string_view text_of(const at::Tensor& bytes) {
  return {static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes()};
}

}  // namespace

ReceiveQueue::Channel& ReceiveQueue::channel_of(int from, Tag tag) {
  const auto [found, is_new] = channels_.try_emplace({from, tag.channel});
  if (is_new) found->second.headers = step_.initial_headers();
  return found->second;
}

void ReceiveQueue::begin_step() {
  completed_.clear();
  for (auto& [key, channel] : channels_) {
    if (!channel.incoming.empty()) {
      throw std::logic_error(
          name_of({.channel = key.second, .number = channel.incoming.begin()->first}, "from", key.first) +
          " was posted and not received before the next step.");
    }
    channel.headers = step_.initial_headers();
    channel.shapes.begin_step();
  }
}

void ReceiveQueue::post(int from, Tag tag) {
  control_.throw_if_aborted();
  completed_.clear();
  Channel& channel = channel_of(from, tag);
  if (channel.headers == Headers::Unknown && !channel.opening.work) {
    channel.opening = post(from, tag, MessageKind::Opening, pool_->empty_bytes(1));
  }
  Incoming incoming;
  if (const Metas* metas = channel.shapes.next(tag.number))
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
  control_.wait(*posted.work, deadline, from, concat("no message came from rank ", from));
  step_.waiting_for.store(TransportError::kNoPeer, std::memory_order_relaxed);
  completed_.push_back({.bytes = {}, .work = std::move(posted.work)});
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
  // Messages that were posted before the opening was read have no receive for their headers yet.
  for (auto& [number, all] : channel.incoming) {
    for (Incoming& incoming : all) post_header(incoming, from, {.channel = tag.channel, .number = number});
  }
}

void ReceiveQueue::read_header(Channel& channel, Incoming& incoming, int from, Tag tag, Deadline deadline) {
  if (incoming.header.work) wait(incoming.header, from, deadline);
  const std::size_t rest = internal::rest_of_header(text_of(incoming.header.bytes));
  if (rest > 0) {
    if (!incoming.rest_of_header.bytes.defined()) {
      incoming.rest_of_header = post(from, tag, MessageKind::FreshData, pool_->empty_bytes(rest));
    }
    if (incoming.rest_of_header.work) wait(incoming.rest_of_header, from, deadline);
  }
  Metas metas = decode_header(text_of(incoming.header.bytes),
                              rest > 0 ? text_of(incoming.rest_of_header.bytes) : std::string_view());
  incoming.fresh = post_data(metas, from, tag, MessageKind::FreshData);
  if (step_.caches_shapes()) channel.shapes.add(tag.number, std::move(metas));
}

Message ReceiveQueue::receive(int from, Tag tag, Deadline deadline) {
  control_.throw_if_aborted();
  completed_.clear();
  Channel& channel = channel_of(from, tag);
  if (!channel.incoming.contains(tag.number)) post(from, tag);
  if (channel.headers == Headers::Unknown) read_opening(channel, from, tag, deadline);
  const auto messages = channel.incoming.find(tag.number);
  Incoming& incoming = messages->second.front();
  if (channel.headers == Headers::Off && !incoming.expected) {
    throw PipeliningShapeError(
        concat(name_of(tag, "from", from),
               " was not sent in the step whose shapes are cached.\n  Hint: set dynamic_shapes to "
               "send shapes with every message."));
  }
  if (incoming.expected) wait(*incoming.expected, from, deadline);
  if (channel.headers == Headers::On) {
    if (!incoming.fresh) read_header(channel, incoming, from, tag, deadline);
    wait(*incoming.fresh, from, deadline);
  }
  Message message = std::move((incoming.fresh ? incoming.fresh : incoming.expected)->tensors);
  messages->second.pop_front();
  if (messages->second.empty()) channel.incoming.erase(messages);
  return message;
}

}  // namespace penstock::internal
