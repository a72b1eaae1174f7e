#include "penstock/transport/direct_links.h"

#include <ATen/ops/zeros.h>
#include <c10/core/StreamGuard.h>

#include <stdexcept>

#include "penstock/base/text.h"
#include "penstock/device/streams.h"
#include "penstock/transport/unprofiled.h"
#include "penstock/transport/wire.h"

namespace penstock::internal {
namespace {

// Continues FNV-1a.
std::uint64_t mix(std::uint64_t digest, std::uint32_t number) {
  for (unsigned shift = 0; shift < 32; shift += 8) digest = (digest ^ (number >> shift & 0xffU)) * 0x100000001b3U;
  return digest;
}
constexpr std::uint64_t kEmptyDigest = 0xcbf29ce484222325U;

bool is_direct(const MessageOrder::Entry& entry) {
  return has_streams(entry.from) && has_streams(entry.to) && entry.from.type() == entry.to.type();
}

}  // namespace

std::size_t DirectLink::place_of(Tag tag) const {
  const auto found = places.find({tag.channel, tag.number});
  if (found != places.end()) return found->second;
  throw std::logic_error(name_of(tag, is_sender ? "to" : "from", peer) + " is not in the order of messages.");
}

DeviceSpan DirectLink::begin_span(const c10::Stream& stream) const {
  if (!watch) return {};
  StreamPoint::after(stream).block(*watch);
  return DeviceSpan::begin(*watch);
}

DeviceSpan DirectLink::end_span(DeviceSpan span, const Works& works) const {
  if (span.empty() || works.empty()) return {};
  try {
    const c10::StreamGuard guard(*watch);
    for (const auto& work : works) work->synchronize();
  } catch (const std::exception&) {
    // Whoever needs the operation finds its error.
    return {};
  }
  span.end(*watch);
  return span;
}

DirectLink* DirectLinks::find(const ByChannel& links, int peer, Tag tag) {
  const auto found = links.find({peer, tag.channel});
  return found == links.end() ? nullptr : found->second;
}

bool DirectLinks::set_order(const std::shared_ptr<const MessageOrder>& order) {
  if (order == order_) return false;
  order_ = nullptr;
  for (auto& [key, link] : links_) {
    link.order.clear();
    link.places.clear();
    link.digest = kEmptyDigest;
    link.position = 0;
  }
  sent_.clear();
  received_.clear();
  if (order == nullptr) return false;
  for (const auto& [peer, entries] : order->sent) add(/*is_sender=*/true, peer, entries, sent_);
  for (const auto& [peer, entries] : order->received) add(/*is_sender=*/false, peer, entries, received_);
  connect();
  order_ = order;
  return true;
}

void DirectLinks::add(bool is_sender, int peer, const std::vector<Entry>& entries, ByChannel& by_channel) {
  const char* const direction = is_sender ? "to" : "from";
  for (const Entry& entry : entries) {
    if (!is_direct(entry)) continue;
    const Key key{.from = is_sender ? rank_ : peer,
                  .to = is_sender ? peer : rank_,
                  .kind = entry.tag.channel % 2,
                  .from_device = entry.from.index(),
                  .to_device = entry.to.index()};
    DirectLink& link = links_[key];
    link.is_sender = is_sender;
    link.peer = peer;
    link.device = is_sender ? entry.from : entry.to;
    if (!link.places.try_emplace({entry.tag.channel, entry.tag.number}, link.order.size()).second) {
      throw std::invalid_argument(name_of(entry.tag, direction, peer) + " is in the order of messages twice.");
    }
    if (by_channel.try_emplace({peer, entry.tag.channel}, &link).first->second != &link) {
      throw std::invalid_argument(concat("channel ", entry.tag.channel, ' ', direction, " rank ", peer,
                                         " connects several pairs of devices in the order of messages."));
    }
    link.order.push_back(entry.tag);
    link.digest = mix(mix(link.digest == 0 ? kEmptyDigest : link.digest, entry.tag.channel), entry.tag.number);
  }
}

void DirectLinks::connect() {
  for (auto& [key, link] : links_) {
    if (link.backend) continue;
    link.backend = create_(concat("direct/", key.from, '-', key.to, '/', key.kind == 0 ? "activations" : "gradients",
                                  '/', key.from_device, '-', key.to_device),
                           link.is_sender ? DirectLink::kSender : DirectLink::kReceiver, link.device);
    link.watch = observing_stream(link.device);
    warm_up(link);
  }
}

void DirectLinks::warm_up(DirectLink& link) const {
  std::vector<at::Tensor> byte{at::zeros({1}, at::TensorOptions(at::kByte).device(link.device))};
  auto work = unprofiled([&] {
    return link.is_sender ? link.backend->send(byte, DirectLink::kReceiver, /*tag=*/0)
                          : link.backend->recv(byte, DirectLink::kSender, /*tag=*/0);
  });
  operations_.add({.works = {std::move(work)},
                   .tensors = byte,
                   .awaited = StreamPoint::now(link.device),
                   .timeout = timeout_,
                   .peer = link.peer,
                   .what = concat("rank ", link.peer, " has not connected")});
}

void DirectLinks::begin_step() {
  for (auto& [key, link] : links_) link.position = 0;
}

}  // namespace penstock::internal
