// Propagates failures between process ranks. A rank that fails broadcasts an abort message; a lost connection is
// detected by the receive that each rank keeps posted from every other one. The first event becomes the abort reason,
// and every pending or later wait throws it.
//
// The channel has a process group of its own, with one posted receive and one thread for each peer: c10d::Work of a
// single message can be waited for, but not polled.
#pragma once

#include <ATen/core/Tensor.h>

#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "penstock/base/mutex.h"
#include "penstock/transport/deadline_timer.h"
#include "penstock/transport/monitor.h"
#include "penstock/transport/transport.h"

namespace penstock::internal {

// Thread-safe, except for leave(), stop() and the destructor, which one thread calls.
//
// Lock order: message_mutex_ before monitor_. Neither is held while the timer is closed or on_aborted is called.
class ControlChannel {
 public:
  // `backend` connects all ranks, and is null if there is only one. `on_aborted` is called once, on the thread that
  // sets the abort reason, after the waits of wait() have been woken.
  ControlChannel(c10::intrusive_ptr<c10d::Backend> backend, std::function<void()> on_aborted);
  ~ControlChannel();
  ControlChannel(const ControlChannel&) = delete;
  ControlChannel& operator=(const ControlChannel&) = delete;

  // Sends a goodbye to the peers, ends all waits of this rank, joins the threads and closes the connections.
  void leave();
  // Does the same but keeps the connections, for a process that exits: it creates no tensor and joins the threads.
  void stop();

  // Sets the abort reason, unless there is one, and broadcasts it.
  void abort(const std::string& why) noexcept;
  // Ends all waits of this rank with an error that was detected outside of them, unless there is an abort reason. The
  // peers are told by abort(), which the rank's thread calls when it has caught the error.
  void fail(const TransportError& error);
  // Implements Transport::on_abort. `report` is called with message_mutex_ held.
  void on_abort(std::function<std::string()> report) PENSTOCK_EXCLUDES(message_mutex_);
  // Implements Transport::reports. Requires that there is an abort reason.
  std::vector<std::optional<std::string>> reports(Deadline deadline);

  // Returns the ranks that have sent a goodbye.
  std::vector<int> ranks_that_left() PENSTOCK_EXCLUDES(monitor_);

  // Throws the abort reason, if there is one.
  void throw_if_aborted() PENSTOCK_EXCLUDES(monitor_);

  // Blocks until one message has been sent to or received from `peer`. Throws TransportError: the abort reason,
  // PeerLost if the connection is lost, or Timeout with `what` if the deadline passes. After a timeout the work may be
  // waited for again.
  void wait(c10d::Work& work, Deadline deadline, int peer, const std::string& what);

  // Throws TransportError for a connection that c10d reports as broken: the abort reason if it arrives within a moment,
  // PeerLost otherwise. `peer` is kNoPeer if any member of a group may be the one that is lost.
  [[noreturn]] void throw_connection_lost(int peer, const std::exception& cause) PENSTOCK_EXCLUDES(monitor_);

 private:
  struct ControlMessage;
  // Constant while the threads run.
  struct Peer {
    int rank = 0;
    at::Tensor message;
    // Null for this rank itself.
    c10::intrusive_ptr<c10d::Work> receive;
    std::thread thread;
  };
  struct PeerState {
    // This peer has sent a goodbye.
    bool left = false;
    // Its only message has been received, or cannot come any more.
    bool is_finished = false;
    std::optional<std::string> report;
  };

  // Waits for the only message of a peer, on the thread of that peer.
  void watch(const Peer& peer);
  void on_message(const Peer& peer);
  // Sets the abort reason and ends all waits, unless there is one already. Peers are sent `broadcast` in its place, if
  // it is not empty.
  void set_abort_reason(TransportError::Why why, int peer, const std::string& what, const std::string& broadcast = {})
      PENSTOCK_EXCLUDES(monitor_);
  // Sends the abort reason and this rank's report to all peers.
  void broadcast_abort() PENSTOCK_EXCLUDES(message_mutex_, monitor_);
  // Sends a message to each peer. Only the first call has an effect.
  void broadcast(const ControlMessage& message) PENSTOCK_REQUIRES(message_mutex_);

  c10::intrusive_ptr<c10d::Backend> backend_;
  const int rank_;
  const std::function<void()> on_aborted_;
  DeadlineTimer timer_;
  // Indexed by rank. Empty if there is only one.
  std::vector<Peer> peers_;

  // Serialises broadcasts, so that each peer is sent one message. Held while the message is sent.
  Mutex message_mutex_ PENSTOCK_ACQUIRED_BEFORE(monitor_);
  // Allocated in the constructor: an abort may have to be sent when the process exits and no operator works any more.
  at::Tensor own_message_ PENSTOCK_GUARDED_BY(message_mutex_);
  bool has_broadcast_ PENSTOCK_GUARDED_BY(message_mutex_) = false;
  std::function<std::string()> report_ PENSTOCK_GUARDED_BY(message_mutex_);

  // Protects what is known of this rank and its peers. Notified when the abort reason is set and when a peer's state
  // changes.
  Monitor monitor_{Clock::duration::zero()};
  std::optional<TransportError> abort_reason_ PENSTOCK_GUARDED_BY(monitor_);
  // Text for the peers if the abort reason is an error of this rank's own waits; empty otherwise.
  std::string broadcast_text_ PENSTOCK_GUARDED_BY(monitor_);
  std::optional<std::string> own_report_ PENSTOCK_GUARDED_BY(monitor_);
  // Indexed by rank.
  std::vector<PeerState> peer_states_ PENSTOCK_GUARDED_BY(monitor_);
};

}  // namespace penstock::internal
