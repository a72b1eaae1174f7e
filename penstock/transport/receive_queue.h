// The receiving side of a rank's channels. A receive is posted as soon as its size is known, into memory of the pool.
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

class ReceiveQueue {
 public:
  ReceiveQueue(ControlChannel& control, DataBackends backends, Step& step, std::shared_ptr<BlockPool> pool)
      : control_(control), backends_(std::move(backends)), step_(step), pool_(std::move(pool)) {}

  void post(int from, Tag tag);
  // The message that was posted first, once it has come. When the deadline passes, it can be asked for again.
  Message receive(int from, Tag tag, Deadline deadline);
  // Throws std::logic_error while a message that was posted has not been received.
  void begin_step();

 private:
  struct Posted {
    at::Tensor bytes;
    c10::intrusive_ptr<c10d::Work> work;
  };
  // Tensors, and the data that still has to come for them.
  struct Arrival {
    Message tensors;
    std::deque<Posted> data;
  };
  struct Incoming {
    // Of the sizes of an earlier step, when it was there in that.
    std::optional<Arrival> expected;
    // While headers are on.
    Posted header;
    Posted long_header;
    std::optional<Arrival> fresh;
  };
  struct Channel {
    Headers headers = Headers::On;
    // While headers are Unknown.
    Posted opening;
    ShapeCache learnt;
    // By number.
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
  Step& step_;
  std::shared_ptr<BlockPool> pool_;
  // What was waited for, until the next call. Gloo's thread lets go of a receive a moment after it has ended it; whoever
  // drops it in that moment yields the core, and gets it back late on a busy machine.
  std::vector<Posted> ended_;
  // What is received goes before the memory that it is received into.
  std::map<std::pair<int, std::uint32_t>, Channel> channels_;
};

}  // namespace penstock::internal
