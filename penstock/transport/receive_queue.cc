#include "penstock/transport/receive_queue.h"

#include <ATen/ops/empty_strided.h>

#include <stdexcept>

#include "penstock/base/text.h"

namespace penstock::internal {

ReceiveQueue::Channel& ReceiveQueue::channel_of(int from, Tag tag) {
  const auto [found, is_new] = channels_.try_emplace({from, tag.channel});
  if (is_new) found->second.headers = step_.initial_headers();
  return found->second;
}

void ReceiveQueue::begin_step() {
  host_.free_completed();
  direct_.begin_step();
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

void ReceiveQueue::post(int from, Tag tag, at::Device device) {
  control_.throw_if_aborted();
  host_.free_completed();
  if (DirectLink* const link = links_.from(from, tag)) return direct_.post(*link, tag);
  Channel& channel = channel_of(from, tag);
  channel.device = device;
  if (channel.headers == Headers::Unknown && !channel.opening.work) {
    channel.opening = host_.post(from, tag, MessageKind::Opening, 1);
  }
  Incoming incoming;
  if (const Metas* metas = channel.shapes.next(tag.number))
    incoming.expected = post_data(channel, *metas, from, tag, MessageKind::Data);
  if (channel.headers == Headers::On) incoming.header = host_.post_header(from, tag);
  channel.incoming[tag.number].push_back(std::move(incoming));
}

ReceiveQueue::Arrival ReceiveQueue::post_data(const Channel& channel, const Metas& metas, int from, Tag tag,
                                              MessageKind kind) {
  const bool is_staged = has_streams(channel.device);
  Arrival arrival;
  for (const std::optional<TensorMeta>& meta : metas) {
    at::Tensor& tensor = arrival.tensors.emplace_back();
    if (!meta) continue;
    tensor = is_staged
                 ? at::empty_strided(meta->shape, meta->strides, at::TensorOptions(meta->dtype).pinned_memory(true))
                 : host_.pool().empty(meta->shape, meta->strides, meta->dtype);
    if (tensor.numel() > 0) arrival.data.push_back(host_.post(from, tag, kind, bytes_of(tensor)));
    if (meta->requires_grad) tensor.set_requires_grad(true);
  }
  if (arrival.data.empty()) arrival.data.push_back(host_.post(from, tag, kind, 1));
  return arrival;
}

void ReceiveQueue::wait(Arrival& arrival, int from, Deadline deadline) {
  while (!arrival.data.empty()) {
    host_.wait(arrival.data.front(), from, deadline);
    arrival.data.pop_front();
  }
}

void ReceiveQueue::read_opening(Channel& channel, int from, Tag tag, Deadline deadline) {
  host_.wait(channel.opening, from, deadline);
  channel.headers = static_cast<Headers>(channel.opening.text().front());
  channel.opening = {};
  if (channel.headers != Headers::On) return;
  step_.changed = true;
  // Messages that were posted before the opening was read have no receive for their headers yet.
  for (auto& [number, all] : channel.incoming) {
    for (Incoming& incoming : all) {
      incoming.header = host_.post_header(from, {.channel = tag.channel, .number = number});
    }
  }
}

void ReceiveQueue::read_header(Channel& channel, Incoming& incoming, int from, Tag tag, Deadline deadline) {
  Metas metas = host_.wait(incoming.header, from, tag, deadline);
  incoming.fresh = post_data(channel, metas, from, tag, MessageKind::FreshData);
  if (step_.caches_shapes()) channel.shapes.add(tag.number, std::move(metas));
}

Message ReceiveQueue::receive(int from, Tag tag, Deadline deadline) {
  control_.throw_if_aborted();
  host_.free_completed();
  if (DirectLink* const link = links_.from(from, tag)) return direct_.receive(*link, tag, deadline);
  Channel& channel = channel_of(from, tag);
  if (!channel.incoming.contains(tag.number)) post(from, tag, channel.device);
  if (channel.headers == Headers::Unknown) read_opening(channel, from, tag, deadline);
  const auto messages = channel.incoming.find(tag.number);
  Incoming& incoming = messages->second.front();
  if (channel.headers == Headers::Off && !incoming.expected) throw_not_in_cached_step(tag, from);
  if (incoming.expected) wait(*incoming.expected, from, deadline);
  if (channel.headers == Headers::On) {
    if (!incoming.fresh) read_header(channel, incoming, from, tag, deadline);
    wait(*incoming.fresh, from, deadline);
  }
  Message message = std::move((incoming.fresh ? incoming.fresh : incoming.expected)->tensors);
  messages->second.pop_front();
  if (messages->second.empty()) channel.incoming.erase(messages);
  const at::Device device = channel.device;
  if (has_streams(device) && !move_to_device(message, device, StreamPoint(), copies_, deadline)) {
    throw TransportError(TransportError::Why::Timeout, from, concat("no message came from rank ", from));
  }
  return message;
}

}  // namespace penstock::internal
