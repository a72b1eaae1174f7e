// The sending side of a rank's channels. A send begins and returns; what is under way is kept until it has been taken.
#pragma once

#include <array>
#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "penstock/transport/control_channel.h"
#include "penstock/transport/monitor.h"
#include "penstock/transport/wire.h"

namespace penstock::internal {

// One for the channels of even numbers and one for the others, so that activations and gradients do not wait for one
// another.
using DataBackends = std::array<c10::intrusive_ptr<c10d::Backend>, 2>;

class SendQueue {
 public:
  // When more than this is under way, the reaper looks for what has been taken and frees it. Below, that waits for the end
  // of the step: it costs a thread's wake-up.
  static constexpr std::size_t kReapSends = 32;
  static constexpr std::size_t kReapBytes = std::size_t{4} << 20U;

  SendQueue(ControlChannel& control, DataBackends backends, Step& step);
  // What is under way is dropped.
  ~SendQueue();
  SendQueue(const SendQueue&) = delete;
  SendQueue& operator=(const SendQueue&) = delete;

  // Waits only when very much is under way. Throws TransportError, and PipeliningShapeError when the receiver expects
  // something else.
  void send(int to, Tag tag, const Message& message, Deadline deadline);
  // Waits until all has been taken.
  void drain(Deadline deadline);
  void begin_step();
  // Ends the thread that frees what was sent.
  void stop();

 private:
  struct Channel {
    Headers headers = Headers::On;
    ShapeCache learnt;
  };
  struct Sent {
    int to = 0;
    std::size_t bytes = 0;
    c10::intrusive_ptr<c10d::Work> work;
  };

  Channel& channel_of(int to, Tag tag);
  void open(Channel& channel, int to, Tag tag);
  void send_with_header(Channel& channel, const std::vector<Packed>& parts, const Metas* expected, int to, Tag tag);
  void send_parts(const std::vector<Packed>& parts, int to, Tag tag, MessageKind kind);
  void start(int to, Tag tag, MessageKind kind, const at::Tensor& bytes);
  void start(int to, Tag tag, MessageKind kind, const std::string& bytes);

  // Waits for the oldest send; the lock is held before and after.
  void wait_for_oldest(MonitorLock& lock, Deadline deadline);
  // On the rank's own thread, for others to see.
  void wait_here_for_oldest(MonitorLock& lock, Deadline deadline);
  void reap();
  bool is_much() const;

  ControlChannel& control_;
  DataBackends backends_;
  Step& step_;
  std::map<std::pair<int, std::uint32_t>, Channel> channels_;
  // Some message of this step had a header.
  bool headers_sent_ = false;

  // What follows is used by the reaper too, under the gate's lock.
  Monitor monitor_{Clock::duration::zero()};
  std::deque<Sent> under_way_;
  std::size_t bytes_under_way_ = 0;
  // Of those, how many somebody waits for now.
  std::size_t waited_for_ = 0;
  bool ending_ = false;
  std::thread reaper_;
};

}  // namespace penstock::internal
