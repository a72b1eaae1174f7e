// The receives of messages that are sent from device to device. Receives of a link are posted in the sender's order,
// each when its shapes are known: from the opening and the cache of shapes, or from its header. So both ends of a link
// always agree on sizes, which device backends do not check.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "penstock/device/transfer.h"
#include "penstock/transport/device_operations.h"
#include "penstock/transport/direct_links.h"
#include "penstock/transport/host_receives.h"
#include "penstock/transport/wire.h"

namespace penstock::internal {

// Used by the rank's thread only.
class DirectReceives {
 public:
  // The references must outlive the object. They belong to the transport that it is a member of.
  DirectReceives(ControlChannel& control, HostReceives& host, TransportStep& step, DeviceOperations& operations)
      : control_(control), host_(host), step_(step), operations_(operations) {}

  // Posts what can be posted without waiting, up to this message.
  void post(DirectLink& link, Tag tag);
  // Posts the receives of the link up to this message, and blocks until their shapes are known. The current stream of
  // the link's device then waits for the tensors.
  Message receive(DirectLink& link, Tag tag, Deadline deadline);
  // Throws std::logic_error if a message was posted and has not been received.
  void begin_step();
  // Returns true if receives were posted of messages that have not been asked for.
  bool has_posted() const;

 private:
  struct Incoming {
    // Posted if the channel has headers in this step.
    HeaderReceive header;
    // Set when the receives are posted.
    Message tensors;
    DirectLink::Works works;
    DeviceSpan span;
  };
  struct Channel {
    Headers headers = Headers::Unknown;
    HostReceive opening;
    ShapeCache shapes;
    // Messages by number.
    std::map<std::uint32_t, Incoming> incoming;
  };

  // Posts the receive of the metadata that is needed next.
  Channel& announce(const DirectLink& link, Tag tag);
  void read_opening(Channel& channel, const DirectLink& link, Tag tag, Deadline deadline);
  // Posts the receives of the link's next message.
  void post_next(DirectLink& link, Deadline deadline);
  void post_tensors(const DirectLink& link, Incoming& incoming, const Metas& metas);

  ControlChannel& control_;
  HostReceives& host_;
  TransportStep& step_;
  DeviceOperations& operations_;
  // Tensors are allocated on its streams, so that a receive does not wait for what the rank is computing.
  CopyStreams streams_;
  // Channels by sender and number.
  std::map<std::pair<int, std::uint32_t>, Channel> channels_;
};

}  // namespace penstock::internal
