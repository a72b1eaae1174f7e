// The receiving side of a process rank. A receive is posted as soon as its size is known, into memory of the pool.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "penstock/transport/block_pool.h"
#include "penstock/transport/control_channel.h"
#include "penstock/transport/send_queue.h"
#include "penstock/transport/wire.h"

namespace penstock::internal {

// Used by the rank's thread only.
class ReceiveQueue {
 public:
  // `control` and `step` must outlive the queue. Both belong to the transport that the queue is a member of.
  ReceiveQueue(ControlChannel& control, DataBackends backends, TransportStep& step, std::shared_ptr<BlockPool> pool)
      : control_(control), backends_(std::move(backends)), step_(step), pool_(std::move(pool)) {}

  void post(int from, Tag tag);
  // Blocks until the message of this tag that was posted first has arrived. Posts it if none was. After a timeout the
  // call may be repeated. Throws TransportError.
  Message receive(int from, Tag tag, Deadline deadline);
  // Throws std::logic_error if a message was posted and has not been received.
  void begin_step();

 private:
  struct Posted {
    at::Tensor bytes;
    c10::intrusive_ptr<c10d::Work> work;
  };
  // The tensors of a message, and the receives that have not completed.
  struct Arrival {
    Message tensors;
    std::deque<Posted> data;
  };
  struct Incoming {
    // Receives of the cached shapes, if there are any.
    std::optional<Arrival> expected;
    // The header and the data that it describes. Used only if the channel has headers in this step.
    Posted header;
    Posted rest_of_header;
    std::optional<Arrival> fresh;
  };
  struct Channel {
    Headers headers = Headers::On;
    // Posted while `headers` is Unknown.
    Posted opening;
    ShapeCache shapes;
    // Messages by number, in the order in which they were posted.
    std::map<std::uint32_t, std::deque<Incoming>> incoming;
  };

  Channel& channel_of(int from, Tag tag);
  Posted post(int from, Tag tag, MessageKind kind, const at::Tensor& bytes);
  void post_header(Incoming& incoming, int from, Tag tag);
  Arrival post_data(const Metas& metas, int from, Tag tag, MessageKind kind);
  void read_opening(Channel& channel, int from, Tag tag, Deadline deadline);
  void read_header(Channel& channel, Incoming& incoming, int from, Tag tag, Deadline deadline);
  void wait(Posted& posted, int from, Deadline deadline);
  void wait(Arrival& arrival, int from, Deadline deadline);

  ControlChannel& control_;
  DataBackends backends_;
  TransportStep& step_;
  std::shared_ptr<BlockPool> pool_;
  // Completed receives, kept until the next call. Gloo's thread releases a receive shortly after it has completed it; a
  // destructor that runs in that moment yields the core, and gets it back much later on a busy machine.
  std::vector<Posted> completed_;
  // Channels by sender and number. Declared after the pool, as its receives use memory of the pool.
  std::map<std::pair<int, std::uint32_t>, Channel> channels_;
};

}  // namespace penstock::internal
