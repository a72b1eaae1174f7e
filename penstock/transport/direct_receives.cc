#include "penstock/transport/direct_receives.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <stdexcept>

#include "penstock/base/text.h"
#include "penstock/device/streams.h"
#include "penstock/transport/unprofiled.h"

namespace penstock::internal {

void DirectReceives::begin_step() {
  for (auto& [key, channel] : channels_) {
    if (!channel.incoming.empty()) {
      throw std::logic_error(
          name_of({.channel = key.second, .number = channel.incoming.begin()->first}, "from", key.first) +
          " was posted and not received before the next step.");
    }
    channel.headers = Headers::Unknown;
    channel.shapes.begin_step();
  }
}

bool DirectReceives::has_posted() const {
  return std::ranges::any_of(channels_, [](const auto& channel) {
    return std::ranges::any_of(channel.second.incoming,
                               [](const auto& incoming) { return !incoming.second.works.empty(); });
  });
}

DirectReceives::Channel& DirectReceives::announce(const DirectLink& link, Tag tag) {
  Channel& channel = channels_[{link.peer, tag.channel}];
  if (channel.headers == Headers::Unknown && !channel.opening.work) {
    channel.opening = host_.post(link.peer, tag, MessageKind::Opening, kDirectOpeningBytes);
  }
  Incoming& incoming = channel.incoming[tag.number];
  if (channel.headers == Headers::On && !incoming.header.first.bytes.defined()) {
    incoming.header = host_.post_header(link.peer, tag);
  }
  return channel;
}

void DirectReceives::post(DirectLink& link, Tag tag) {
  control_.throw_if_aborted();
  const std::size_t place = link.place_of(tag);
  announce(link, tag);
  while (link.position <= place && announce(link, link.order[link.position]).headers == Headers::Off) {
    post_next(link, Deadline::min());
  }
}

void DirectReceives::read_opening(Channel& channel, const DirectLink& link, Tag tag, Deadline deadline) {
  host_.wait(channel.opening, link.peer, deadline);
  const DirectOpening opening = decode_direct_opening(channel.opening.text());
  channel.opening = {};
  if (opening.digest != link.digest) {
    throw std::logic_error(concat("rank ", link.peer, " sends the messages of channel ", tag.channel,
                                  " in another order than this rank expects.\n  Hint: call set_order() on all ranks, "
                                  "with the order of one schedule."));
  }
  channel.headers = opening.headers;
  if (channel.headers == Headers::On) step_.changed = true;
}

void DirectReceives::post_next(DirectLink& link, Deadline deadline) {
  const Tag tag = link.order[link.position];
  Channel& channel = announce(link, tag);
  if (channel.headers == Headers::Unknown) {
    read_opening(channel, link, tag, deadline);
    announce(link, tag);
  }
  Incoming& incoming = channel.incoming.at(tag.number);
  if (channel.headers == Headers::On) {
    Metas metas = host_.wait(incoming.header, link.peer, tag, deadline);
    post_tensors(link, incoming, metas);
    if (step_.caches_shapes()) channel.shapes.add(tag.number, std::move(metas));
  } else {
    const Metas* const metas = channel.shapes.next(tag.number);
    if (metas == nullptr) throw_not_in_cached_step(tag, link.peer);
    post_tensors(link, incoming, *metas);
  }
  ++link.position;
}

void DirectReceives::post_tensors(const DirectLink& link, Incoming& incoming, const Metas& metas) {
  const c10::AutoGradMode no_grad(false);
  const c10::StreamGuard stream(streams_.incoming(link.device));
  DeviceSpan span = link.begin_span(streams_.incoming(link.device));
  for (const std::optional<TensorMeta>& meta : metas) {
    at::Tensor& tensor = incoming.tensors.emplace_back();
    if (!meta) continue;
    tensor = at::empty_strided(meta->shape, meta->strides, at::TensorOptions(meta->dtype).device(link.device));
    if (tensor.numel() > 0) {
      std::vector<at::Tensor> bytes{bytes_of(tensor)};
      try {
        incoming.works.push_back(unprofiled([&] { return link.backend->recv(bytes, DirectLink::kSender, /*tag=*/0); }));
      } catch (const c10::Error& error) {
        control_.throw_connection_lost(link.peer, error);
      }
    }
    if (meta->requires_grad) tensor.set_requires_grad(true);
  }
  incoming.span = link.end_span(std::move(span), incoming.works);
}

Message DirectReceives::receive(DirectLink& link, Tag tag, Deadline deadline) {
  control_.throw_if_aborted();
  // The device has all of it, also if the metadata was late.
  const Clock::duration timeout = deadline - Clock::now();
  const std::size_t place = link.place_of(tag);
  while (link.position <= place) post_next(link, deadline);
  auto& all = channels_.at({link.peer, tag.channel}).incoming;
  const auto found = all.find(tag.number);
  if (found == all.end()) {
    throw std::logic_error(name_of(tag, "from", link.peer) + " has been received in this step already.");
  }
  Incoming incoming = std::move(found->second);
  all.erase(found);
  if (incoming.works.empty()) return std::move(incoming.tensors);
  operations_.add({.works = incoming.works,
                   .awaited = StreamPoint::now(link.device),
                   .timeout = timeout,
                   .peer = link.peer,
                   .what = concat("no message came from rank ", link.peer),
                   .tag = tag,
                   .is_receive = true});
  try {
    // Unlike wait(), it makes the stream wait and not the host, whatever the backend's options are.
    for (const auto& work : incoming.works) work->synchronize();
  } catch (const std::exception& error) {
    control_.throw_connection_lost(link.peer, error);
  }
  for (const at::Tensor& tensor : incoming.tensors) use_on_stream(tensor);
  if (!incoming.span.empty()) TransferLog::add(incoming.span);
  return std::move(incoming.tensors);
}

}  // namespace penstock::internal
