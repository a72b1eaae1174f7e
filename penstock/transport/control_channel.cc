#include "penstock/transport/control_channel.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/tensor/reason.h"
#include "penstock/transport/start_thread.h"
#include "penstock/transport/unprofiled.h"

namespace penstock::internal {
namespace {

// All control messages have one size, as receives are posted before there is a message.
constexpr std::size_t kMessageBytes = 4096;
constexpr int kTag = 0;

// A lost connection may be detected shortly before the abort message of that rank is read, so errors wait this long for
// the reason.
constexpr Clock::duration kGracePeriod = std::chrono::seconds(1);
// Peers have their receives posted, so a control message is sent at once. A peer that takes longer cannot process it
// anyway.
constexpr std::chrono::milliseconds kBroadcastTimeout{200};
// Minimum time for a wait whose deadline has passed, so that a message that has arrived is found.
constexpr Clock::duration kMinimumWait = std::chrono::milliseconds(2);

using Text = std::array<char, 2000>;

// Copies the text, truncated if necessary. `buffer` is filled with zeros.
void copy_text(Text& buffer, const std::string& text) {
  std::copy_n(text.begin(), std::min(text.size(), buffer.size() - 1), buffer.begin());
}

}  // namespace

// The only message that a rank sends to each peer, copied byte by byte.
struct ControlChannel::ControlMessage {
  enum class Kind : std::uint8_t { Goodbye, Abort } kind = Kind::Goodbye;
  TransportError::Why why = TransportError::Why::Aborted;
  int peer = TransportError::kNoPeer;
  // Both texts end with a zero.
  Text what = {};
  Text report = {};
};

ControlChannel::ControlChannel(c10::intrusive_ptr<c10d::Backend> backend, std::function<void()> on_aborted)
    : backend_(std::move(backend)), rank_(backend_ ? backend_->getRank() : 0), on_aborted_(std::move(on_aborted)) {
  if (!backend_) return;
  own_message_ = at::zeros({static_cast<std::int64_t>(kMessageBytes)}, at::kByte);
  peers_.resize(static_cast<std::size_t>(backend_->getSize()));
  peer_states_.resize(peers_.size());
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    Peer& peer = peers_[i];
    peer.rank = static_cast<int>(i);
    if (peer.rank == backend_->getRank()) continue;
    peer.message = at::empty({static_cast<std::int64_t>(kMessageBytes)}, at::kByte);
    std::vector<at::Tensor> messages{peer.message};
    peer.receive = unprofiled([&] { return backend_->recv(messages, peer.rank, kTag); });
  }
  // A peer that has left in the meantime is detected by its thread.
  try {
    for (Peer& peer : peers_) {
      if (peer.receive) peer.thread = start_thread([this, &peer] { watch(peer); });
    }
  } catch (...) {
    leave();
    throw;
  }
}

ControlChannel::~ControlChannel() {
  leave();
}

void ControlChannel::leave() {
  stop();
  // Posted receives refer to the group, so they are destroyed first.
  for (Peer& peer : peers_) peer.receive.reset();
  backend_.reset();
}

void ControlChannel::stop() {
  bool is_aborted = false;
  {
    const MonitorLock lock(monitor_);
    is_aborted = abort_reason_.has_value();
  }
  if (is_aborted) {
    broadcast_abort();
  } else {
    const MutexLock lock(message_mutex_);
    broadcast({.kind = ControlMessage::Kind::Goodbye});
  }
  set_abort_reason(TransportError::Why::Aborted, TransportError::kNoPeer, "this rank has left");
  for (Peer& peer : peers_) {
    if (peer.receive) peer.receive->abort();
  }
  for (Peer& peer : peers_) {
    if (peer.thread.joinable()) peer.thread.join();
  }
}

void ControlChannel::watch(const Peer& peer) {
  try {
    if (peer.receive->wait(kForever)) on_message(peer);
  } catch (const std::exception&) {
    set_abort_reason(TransportError::Why::PeerLost, peer.rank, concat("connection to rank ", peer.rank, " lost"));
    broadcast_abort();
  }
  const MonitorLock lock(monitor_);
  peer_states_[static_cast<std::size_t>(peer.rank)].is_finished = true;
  monitor_.notify_all();
}

void ControlChannel::on_message(const Peer& peer) {
  ControlMessage message;
  std::memcpy(&message, peer.message.const_data_ptr(), sizeof message);
  {
    const MonitorLock lock(monitor_);
    PeerState& state = peer_states_[static_cast<std::size_t>(peer.rank)];
    state.left = message.kind == ControlMessage::Kind::Goodbye;
    if (state.left) return;
    state.report = message.report.data();
  }
  set_abort_reason(message.why, message.peer, message.what.data());
  broadcast_abort();
}

void ControlChannel::set_abort_reason(TransportError::Why why, int peer, const std::string& what,
                                      const std::string& broadcast) {
  {
    const MonitorLock lock(monitor_);
    if (abort_reason_) return;
    abort_reason_.emplace(why, peer, what);
    broadcast_text_ = broadcast;
    monitor_.notify_all();
  }
  timer_.close();
  on_aborted_();
}

void ControlChannel::abort(const std::string& why) noexcept {
  try {
    set_abort_reason(TransportError::Why::Aborted, TransportError::kNoPeer, why);
    broadcast_abort();
  } catch (...) {  // NOLINT(bugprone-empty-catch): out of memory; the peers will detect the lost connection
  }
}

void ControlChannel::fail(const TransportError& error) {
  set_abort_reason(error.why(), error.peer(), error.what(), concat("rank ", rank_, " has failed"));
}

void ControlChannel::on_abort(std::function<std::string()> report) {
  const MutexLock lock(message_mutex_);
  report_ = std::move(report);
}

void ControlChannel::broadcast_abort() {
  const MutexLock message_lock(message_mutex_);
  if (has_broadcast_) return;
  const std::string report = report_ ? report_() : "";
  ControlMessage message{.kind = ControlMessage::Kind::Abort};
  copy_text(message.report, report);
  {
    const MonitorLock lock(monitor_);
    if (broadcast_text_.empty()) {
      message.why = abort_reason_->why();
      message.peer = abort_reason_->peer();
      copy_text(message.what, abort_reason_->what());
    } else {
      copy_text(message.what, broadcast_text_);
    }
    own_report_ = report;
  }
  broadcast(message);
}

void ControlChannel::broadcast(const ControlMessage& message) {
  static_assert(sizeof(ControlMessage) <= kMessageBytes);
  if (std::exchange(has_broadcast_, true) || !backend_) return;
  std::memcpy(own_message_.data_ptr(), &message, sizeof message);
  std::vector<at::Tensor> messages{own_message_};
  std::vector<c10::intrusive_ptr<c10d::Work>> sends;
  const auto ignore_lost_peer = [](const auto& act) {
    try {
      act();
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): a lost peer needs no message
    }
  };
  for (const Peer& peer : peers_) {
    if (!peer.receive) continue;
    ignore_lost_peer([&] { sends.push_back(unprofiled([&] { return backend_->send(messages, peer.rank, kTag); })); });
  }
  for (const auto& send : sends) ignore_lost_peer([&] { send->wait(kBroadcastTimeout); });
}

std::vector<std::optional<std::string>> ControlChannel::reports(Deadline deadline) {
  // The thread that has set the abort reason may not have called this yet, and own_report_ is set by it.
  broadcast_abort();
  const MonitorLock lock(monitor_);
  monitor_.wait(deadline, [this]() PENSTOCK_REQUIRES(monitor_) {
    for (std::size_t i = 0; i < peers_.size(); ++i) {
      if (peers_[i].receive && !peer_states_[i].is_finished) return false;
    }
    return true;
  });
  std::vector<std::optional<std::string>> reports;
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    reports.push_back(peers_[i].receive ? peer_states_[i].report : own_report_);
  }
  if (reports.empty()) reports.push_back(own_report_);
  return reports;
}

std::vector<int> ControlChannel::ranks_that_left() {
  const MonitorLock lock(monitor_);
  std::vector<int> ranks;
  for (std::size_t i = 0; i < peer_states_.size(); ++i) {
    if (peer_states_[i].left) ranks.push_back(static_cast<int>(i));
  }
  return ranks;
}

void ControlChannel::throw_if_aborted() {
  const MonitorLock lock(monitor_);
  if (abort_reason_) throw TransportError(*abort_reason_);
}

void ControlChannel::wait(c10d::Work& work, Deadline deadline, int peer, const std::string& what) {
  bool is_done = false;
  try {
    const DeadlineTimer::Alarm alarm(timer_, std::max(deadline, Clock::now() + kMinimumWait),
                                     [&work] { work.abort(); });
    is_done = work.wait(kForever);
  } catch (const std::exception& error) {
    throw_connection_lost(peer, error);
  }
  if (is_done) return;
  throw_if_aborted();
  throw TransportError(TransportError::Why::Timeout, peer, what + " within the deadline");
}

void ControlChannel::throw_connection_lost(int peer, const std::exception& cause) {
  const MonitorLock lock(monitor_);
  // Returns the rank that has left and explains the lost connection, or kNoPeer.
  const auto rank_that_left = [this, peer]() PENSTOCK_REQUIRES(monitor_) {
    for (std::size_t i = 0; i < peer_states_.size(); ++i) {
      const int rank = static_cast<int>(i);
      if (peer_states_[i].left && (peer == TransportError::kNoPeer || rank == peer)) return rank;
    }
    return TransportError::kNoPeer;
  };
  monitor_.wait(Clock::now() + kGracePeriod, [&]() PENSTOCK_REQUIRES(monitor_) {
    return abort_reason_ || rank_that_left() != TransportError::kNoPeer;
  });
  if (abort_reason_) throw TransportError(*abort_reason_);
  if (const int rank = rank_that_left(); rank != TransportError::kNoPeer) {
    throw TransportError(TransportError::Why::PeerLost, rank, concat("rank ", rank, " has ended"));
  }
  const std::string lost = peer == TransportError::kNoPeer ? "a rank of a group" : concat("rank ", peer);
  throw TransportError(TransportError::Why::PeerLost, peer,
                       concat("connection to ", lost, " lost: ", brief_reason_of(cause)));
}

}  // namespace penstock::internal
