// The receiving side of a process rank. A receive is posted as soon as its size is known, into memory of the pool.
// Tensors that are wanted on a device are received into pinned memory, and copied to the device beside the computation,
// unless their messages are sent from device to device.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <utility>

#include "penstock/device/transfer.h"
#include "penstock/transport/control_channel.h"
#include "penstock/transport/direct_links.h"
#include "penstock/transport/direct_receives.h"
#include "penstock/transport/host_receives.h"
#include "penstock/transport/wire.h"

namespace penstock::internal {

// Used by the rank's thread only.
class ReceiveQueue {
 public:
  // The references must outlive the queue. They belong to the transport that the queue is a member of.
  ReceiveQueue(ControlChannel& control, HostReceives& host, TransportStep& step, DirectLinks& links,
               DeviceOperations& operations)
      : control_(control), host_(host), step_(step), links_(links), direct_(control, host, step, operations) {}

  // `device` is where the tensors of the channel are wanted.
  void post(int from, Tag tag, at::Device device);
  // Blocks until the message of this tag that was posted first has arrived. Posts it if none was. After a timeout the
  // call may be repeated. Throws TransportError.
  Message receive(int from, Tag tag, Deadline deadline);
  // Throws std::logic_error if a message was posted and has not been received.
  void begin_step();
  // Returns true if device backends have receives of messages that have not been asked for.
  bool has_posted_directly() const { return direct_.has_posted(); }

 private:
  // The tensors of a message, and the receives that have not completed.
  struct Arrival {
    Message tensors;
    std::deque<HostReceive> data;
  };
  struct Incoming {
    // Receives of the cached shapes, if there are any.
    std::optional<Arrival> expected;
    // The header and the data that it describes. Used only if the channel has headers in this step.
    HeaderReceive header;
    std::optional<Arrival> fresh;
  };
  struct Channel {
    at::Device device = at::kCPU;
    Headers headers = Headers::On;
    // Posted while `headers` is Unknown.
    HostReceive opening;
    ShapeCache shapes;
    // Messages by number, in the order in which they were posted.
    std::map<std::uint32_t, std::deque<Incoming>> incoming;
  };

  Channel& channel_of(int from, Tag tag);
  Arrival post_data(const Channel& channel, const Metas& metas, int from, Tag tag, MessageKind kind);
  void read_opening(Channel& channel, int from, Tag tag, Deadline deadline);
  void read_header(Channel& channel, Incoming& incoming, int from, Tag tag, Deadline deadline);
  void wait(Arrival& arrival, int from, Deadline deadline);

  ControlChannel& control_;
  HostReceives& host_;
  TransportStep& step_;
  DirectLinks& links_;
  DirectReceives direct_;
  CopyStreams copies_;
  // Channels by sender and number.
  std::map<std::pair<int, std::uint32_t>, Channel> channels_;
};

}  // namespace penstock::internal
