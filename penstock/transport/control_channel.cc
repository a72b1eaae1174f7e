#include "penstock/transport/control_channel.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "penstock/tensor/reason.h"
#include "penstock/transport/start_thread.h"
#include "penstock/transport/unprofiled.h"

namespace penstock::internal {
namespace {

// All messages are of one size, as a receive is posted before there is anything to say.
constexpr std::size_t kMessageBytes = 4096;
constexpr int kTag = 0;

}  // namespace

// What a rank says to another, once.
struct ControlChannel::Word {
  enum class MessageKind : std::uint8_t { GoodBye, Verdict } kind = MessageKind::GoodBye;
  TransportError::Why why = TransportError::Why::Aborted;
  int peer = TransportError::kNoPeer;
  // Both end with a zero.
  std::array<char, 2000> what = {};
  std::array<char, 2000> report = {};
};

namespace {

// A connection breaks a moment before the other side's last word is read, or the other way round.
constexpr Clock::duration kGrace = std::chrono::seconds(1);
// The others' receives are posted, so that a word is gone at once; else its rank is in no state to hear it.
constexpr std::chrono::milliseconds kLastWord{200};
// To find what is there already when the deadline has passed.
constexpr Clock::duration kLook = std::chrono::milliseconds(2);

void put(std::array<char, 2000>& to, const std::string& text) {
  std::copy_n(text.begin(), std::min(text.size(), to.size() - 1), to.begin());
}

}  // namespace

ControlChannel::ControlChannel(c10::intrusive_ptr<c10d::Backend> backend, std::function<void()> on_verdict)
    : backend_(std::move(backend)), on_verdict_(std::move(on_verdict)) {
  if (!backend_) return;
  own_message_ = at::zeros({static_cast<std::int64_t>(kMessageBytes)}, at::kByte);
  peers_.resize(static_cast<std::size_t>(backend_->getSize()));
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    Peer& peer = peers_[i];
    peer.rank = static_cast<int>(i);
    if (peer.rank == backend_->getRank()) continue;
    peer.message = at::empty({static_cast<std::int64_t>(kMessageBytes)}, at::kByte);
    std::vector<at::Tensor> messages{peer.message};
    peer.receive = unprofiled([&] { return backend_->recv(messages, peer.rank, kTag); });
  }
  // Those who have left by now are noticed here.
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
  // What is posted goes before its group.
  for (Peer& peer : peers_) peer.receive.reset();
  backend_.reset();
}

void ControlChannel::stop() {
  bool failed = false;
  {
    const MonitorLock lock(monitor_);
    failed = verdict_.has_value();
  }
  if (failed) {
    say_verdict();
  } else {
    const std::lock_guard lock(word_mutex_);
    say({});
  }
  conclude(TransportError::Why::Aborted, TransportError::kNoPeer, "this rank has left");
  for (Peer& peer : peers_) {
    if (peer.receive) peer.receive->abort();
  }
  for (Peer& peer : peers_) {
    if (peer.thread.joinable()) peer.thread.join();
  }
}

void ControlChannel::watch(Peer& peer) {
  try {
    if (peer.receive->wait(kForever)) hear(peer);
  } catch (const std::exception&) {
    conclude(TransportError::Why::PeerLost, peer.rank, "connection to rank " + std::to_string(peer.rank) + " lost");
    say_verdict();
  }
  const MonitorLock lock(monitor_);
  peer.silent = true;
  monitor_.notify_all();
}

void ControlChannel::hear(Peer& peer) {
  Word word;
  std::memcpy(&word, peer.message.const_data_ptr(), sizeof word);
  {
    const MonitorLock lock(monitor_);
    peer.left = word.kind == Word::MessageKind::GoodBye;
    if (peer.left) return;
    peer.report = word.report.data();
  }
  conclude(word.why, word.peer, word.what.data());
  say_verdict();
}

void ControlChannel::conclude(TransportError::Why why, int peer, const std::string& what) {
  {
    const MonitorLock lock(monitor_);
    if (verdict_) return;
    verdict_.emplace(why, peer, what);
    monitor_.notify_all();
  }
  alarms_.close();
  on_verdict_();
}

void ControlChannel::abort(const std::string& why) noexcept {
  try {
    conclude(TransportError::Why::Aborted, TransportError::kNoPeer, why);
    say_verdict();
  } catch (...) {  // NOLINT(bugprone-empty-catch): out of memory, and the others will see that this rank is gone
  }
}

void ControlChannel::on_abort(std::function<std::string()> report) {
  const std::lock_guard lock(word_mutex_);
  report_ = std::move(report);
}

void ControlChannel::say_verdict() {
  const std::lock_guard word_lock(word_mutex_);
  if (spoken_) return;
  const std::string report = report_ ? report_() : "";
  Word word{.kind = Word::MessageKind::Verdict};
  put(word.report, report);
  {
    const MonitorLock lock(monitor_);
    word.why = verdict_->why();
    word.peer = verdict_->peer();
    put(word.what, verdict_->what());
    own_report_ = report;
  }
  say(word);
}

void ControlChannel::say(const Word& word) {
  static_assert(sizeof(Word) <= kMessageBytes);
  if (std::exchange(spoken_, true) || !backend_) return;
  std::memcpy(own_message_.data_ptr(), &word, sizeof word);
  std::vector<at::Tensor> messages{own_message_};
  std::vector<c10::intrusive_ptr<c10d::Work>> sends;
  const auto to_each = [](const auto& act) {
    try {
      act();
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): who is not there any more hears nothing
    }
  };
  for (const Peer& peer : peers_) {
    if (!peer.receive) continue;
    to_each([&] { sends.push_back(unprofiled([&] { return backend_->send(messages, peer.rank, kTag); })); });
  }
  for (const auto& send : sends) to_each([&] { send->wait(kLastWord); });
}

std::vector<std::optional<std::string>> ControlChannel::reports(Deadline deadline) {
  // Another thread may be just about to.
  say_verdict();
  MonitorLock lock(monitor_);
  monitor_.wait(deadline, [this] {
    return std::all_of(peers_.begin(), peers_.end(), [](const Peer& one) { return !one.receive || one.silent; });
  });
  std::vector<std::optional<std::string>> all;
  for (const Peer& peer : peers_) all.push_back(peer.receive ? peer.report : own_report_);
  if (all.empty()) all.push_back(own_report_);
  return all;
}

void ControlChannel::throw_if_aborted() {
  const MonitorLock lock(monitor_);
  if (verdict_) throw TransportError(*verdict_);
}

void ControlChannel::wait(c10d::Work& work, Deadline deadline, int peer, const std::string& what) {
  bool done = false;
  try {
    const DeadlineTimer::Alarm alarm(alarms_, std::max(deadline, Clock::now() + kLook), [&work] { work.abort(); });
    done = work.wait(kForever);
  } catch (const std::exception& error) {
    throw_connection_lost(peer, error);
  }
  if (done) return;
  throw_if_aborted();
  throw TransportError(TransportError::Why::Timeout, peer, what + " within the deadline");
}

void ControlChannel::throw_connection_lost(int peer, const std::exception& how) {
  MonitorLock lock(monitor_);
  const auto left = [this, peer] {
    return std::find_if(peers_.begin(), peers_.end(), [peer](const Peer& one) {
      return one.left && (peer == TransportError::kNoPeer || one.rank == peer);
    });
  };
  monitor_.wait(Clock::now() + kGrace, [&] { return verdict_ || left() != peers_.end(); });
  if (verdict_) throw TransportError(*verdict_);
  if (const auto found = left(); found != peers_.end()) {
    throw TransportError(TransportError::Why::PeerLost, found->rank,
                         "rank " + std::to_string(found->rank) + " has ended");
  }
  const std::string whom = peer == TransportError::kNoPeer ? "a rank of a group" : "rank " + std::to_string(peer);
  throw TransportError(TransportError::Why::PeerLost, peer, "connection to " + whom + " lost: " + brief_reason_of(how));
}

}  // namespace penstock::internal
