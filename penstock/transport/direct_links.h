// The communicators through which a rank exchanges messages from device to device. A device backend has no tags, and runs
// the operations of a communicator one after the other, so there is one communicator of two ranks for each direction,
// kind of message and pair of devices: a link. Its messages are sent and received in the order in which the sender's
// schedule sends them.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "penstock/device/device_span.h"
#include "penstock/transport/device_operations.h"
#include "penstock/transport/message_order.h"

namespace penstock::internal {

// One end of a link. The sender is member 0 of the backend, and the receiver member 1.
struct DirectLink {
  static constexpr int kSender = 0;
  static constexpr int kReceiver = 1;

  using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

  // Returns the place of a message in the order. Throws std::logic_error if it is not there.
  std::size_t place_of(Tag tag) const;

  // Measures when the operations of a message run: from when everything that is in `stream` and all earlier operations of
  // the link have ended, until these have. The backend's own stream cannot be looked at, so the link's `watch` stream
  // waits for what it waits for. Nothing ever waits for that one. The span is empty without such a stream, or if an
  // operation has failed.
  DeviceSpan begin_span(const c10::Stream& stream) const;
  DeviceSpan end_span(DeviceSpan span, const Works& works) const;

  bool is_sender = false;
  int peer = 0;
  // Device of this end.
  at::Device device = at::kCPU;
  c10::intrusive_ptr<c10d::Backend> backend;
  std::optional<c10::Stream> watch;
  // The messages of a step, and a digest of them.
  std::vector<Tag> order;
  std::uint64_t digest = 0;
  // Number of messages of this step that have been sent, or for which receives have been posted.
  std::size_t position = 0;
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::size_t> places;
};

// Used by the rank's thread.
class DirectLinks {
 public:
  // Creates the backend of a group of two ranks. It blocks until both ranks have called it for the same name.
  using Create =
      std::function<c10::intrusive_ptr<c10d::Backend>(const std::string& name, int member, at::Device device)>;

  // `operations` outlives the object. Ranks have the timeout to connect.
  DirectLinks(int rank, DeviceOperations& operations, Clock::duration timeout, Create create)
      : rank_(rank), operations_(operations), timeout_(timeout), create_(std::move(create)) {}

  // Implements Transport::set_order, and creates the links that are missing. Returns true if ranks may have created
  // some: the result is the same on all of them.
  //
  // It cannot deadlock. All links of all ranks are in one global order, in which each rank creates its own. Of the links
  // that are being created anywhere, take the first in that order: both of its ranks have created all that come before,
  // so both are at it or come to it without waiting for a later one.
  bool set_order(const std::shared_ptr<const MessageOrder>& order);
  // Call it at the beginning of a step.
  void begin_step();

  // Return the link of a message to or from a rank, or nullptr if the message is not in the order or at least one of its
  // ends is on the CPU. The pointer is valid until set_order().
  DirectLink* to(int peer, Tag tag) { return find(sent_, peer, tag); }
  DirectLink* from(int peer, Tag tag) { return find(received_, peer, tag); }

 private:
  // Identifies a link on all ranks. Links are created in the order of their keys.
  struct Key {
    int from = 0;
    int to = 0;
    std::uint32_t kind = 0;
    int from_device = 0;
    int to_device = 0;
    auto operator<=>(const Key&) const = default;
  };
  using ByChannel = std::map<std::pair<int, std::uint32_t>, DirectLink*>;
  using Entry = MessageOrder::Entry;

  static DirectLink* find(const ByChannel& links, int peer, Tag tag);
  // Adds the messages between this rank and a peer to their links.
  void add(bool is_sender, int peer, const std::vector<Entry>& entries, ByChannel& by_channel);
  void connect();
  // Sends a byte through a new link. NCCL connects two ranks at their first message, and blocks their hosts meanwhile,
  // which could deadlock in a step.
  void warm_up(DirectLink& link) const;

  const int rank_;
  DeviceOperations& operations_;
  const Clock::duration timeout_;
  const Create create_;
  std::shared_ptr<const MessageOrder> order_;
  std::map<Key, DirectLink> links_;
  // Links by peer and channel.
  ByChannel sent_;
  ByChannel received_;
};

}  // namespace penstock::internal
