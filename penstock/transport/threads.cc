#include "penstock/transport/threads.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "penstock/base/mutex.h"
#include "penstock/base/text.h"
#include "penstock/device/streams.h"
#include "penstock/device/transfer.h"
#include "penstock/transport/collective_round.h"
#include "penstock/transport/mailbox.h"
#include "penstock/transport/wire.h"

namespace penstock {
namespace {

using internal::concat;
using internal::CopyStreams;
using internal::devices_of;
using internal::Mailbox;
using internal::Mutex;
using internal::MutexLock;
using internal::RankStreams;
using internal::StreamPoint;
using internal::WaitResult;

using Tensors = std::vector<at::Tensor>;

// The contribution of one member to a collective: the collective itself, which all members pass alike, and its tensors.
struct Contribution {
  std::function<void(std::vector<Contribution>&)> collective;
  Tensors tensors;
  // The point at which devices have computed the tensors, and all else that the member's thread has started.
  StreamPoint computed;
  // Where the member that runs the collective stores the point at which it has ended, for the contribution's member.
  std::shared_ptr<StreamPoint> ended;
};
using Rounds = internal::CollectiveRound<Contribution>;

// Time that a waiting rank spins: long enough for a rank that is about to answer, short compared with a context switch.
constexpr Clock::duration kSpinTime = std::chrono::microseconds(50);

Clock::duration spin_time_for(int ranks) {
  return static_cast<unsigned>(ranks) <= std::thread::hardware_concurrency() ? kSpinTime : Clock::duration::zero();
}

// A message in a mailbox, and the point at which devices have computed it.
struct Parcel {
  Message message;
  StreamPoint computed;
};

// Runs a collective on the thread of the member that arrived last, in its streams, without waiting for the devices.
void run_collective(std::vector<Contribution>& contributions) {
  StreamPoint ended;
  Tensors all;
  for (const Contribution& contribution : contributions) {
    ended.add(contribution.computed);
    all.insert(all.end(), contribution.tensors.begin(), contribution.tensors.end());
  }
  const std::vector<at::Device> devices = devices_of(all);
  ended.block(devices);
  contributions.front().collective(contributions);
  for (const at::Tensor& tensor : all) {
    if (!devices.empty()) internal::use_on_stream(tensor);
  }
  ended.add(StreamPoint::now(devices));
  for (const Contribution& contribution : contributions) *contribution.ended = ended;
}

// State that all ranks share.
//
// Lock order: mutex_ before the monitors of mailboxes and rounds, which abort() and rounds_of() close while they hold
// it.
class Shared {
 public:
  explicit Shared(int ranks) : spin_time_(spin_time_for(ranks)), reporters_(static_cast<std::size_t>(ranks)) {
    reports_.reserve(reporters_.size());
    for (int rank = 0; rank < ranks; ++rank) mailboxes_.emplace_back(spin_time_);
  }

  int ranks() const { return static_cast<int>(mailboxes_.size()); }
  Mailbox<Parcel>& mailbox_of(int rank) { return mailboxes_.at(static_cast<std::size_t>(rank)); }
  // Returns the rounds of a group. `number` counts the groups of the same ranks.
  std::shared_ptr<Rounds> rounds_of(const std::vector<int>& ranks, std::size_t number) PENSTOCK_EXCLUDES(mutex_);

  void abort(const std::string& reason) PENSTOCK_EXCLUDES(mutex_);
  std::string abort_reason() PENSTOCK_EXCLUDES(mutex_);
  void on_abort(int rank, std::function<std::string()> report) PENSTOCK_EXCLUDES(mutex_);
  std::vector<std::optional<std::string>> reports() PENSTOCK_EXCLUDES(mutex_);

 private:
  const Clock::duration spin_time_;
  // Indexed by receiver. A deque, as mailboxes cannot be moved. Constant after construction; a mailbox locks itself.
  std::deque<Mailbox<Parcel>> mailboxes_;

  Mutex mutex_;
  bool aborted_ PENSTOCK_GUARDED_BY(mutex_) = false;
  std::string reason_ PENSTOCK_GUARDED_BY(mutex_);
  // Indexed by rank. abort() calls them with the lock held.
  std::vector<std::function<std::string()>> reporters_ PENSTOCK_GUARDED_BY(mutex_);
  // Indexed by rank; empty before abort().
  std::vector<std::optional<std::string>> reports_ PENSTOCK_GUARDED_BY(mutex_);
  std::map<std::pair<std::vector<int>, std::size_t>, std::shared_ptr<Rounds>> rounds_ PENSTOCK_GUARDED_BY(mutex_);
};

std::shared_ptr<Rounds> Shared::rounds_of(const std::vector<int>& ranks, std::size_t number) {
  const MutexLock lock(mutex_);
  std::shared_ptr<Rounds>& rounds = rounds_[{ranks, number}];
  if (!rounds) {
    rounds = std::make_shared<Rounds>(ranks.size(), spin_time_, run_collective);
    if (aborted_) rounds->close();
  }
  return rounds;
}

void Shared::abort(const std::string& reason) {
  const MutexLock lock(mutex_);
  if (aborted_) return;
  aborted_ = true;
  // The waits end even if there is no memory for the reason.
  try {
    reason_ = reason;
    for (const auto& report : reporters_) reports_.emplace_back(report ? report() : "");
  } catch (const std::bad_alloc&) {
    reports_.resize(reporters_.size());
  }
  for (Mailbox<Parcel>& mailbox : mailboxes_) mailbox.close();
  for (const auto& [key, rounds] : rounds_) rounds->close();
}

std::string Shared::abort_reason() {
  const MutexLock lock(mutex_);
  return reason_;
}

void Shared::on_abort(int rank, std::function<std::string()> report) {
  const MutexLock lock(mutex_);
  reporters_[static_cast<std::size_t>(rank)] = std::move(report);
}

std::vector<std::optional<std::string>> Shared::reports() {
  const MutexLock lock(mutex_);
  return reports_;
}

// Throws unless the wait was successful.
void require_ready(WaitResult result, Shared& shared, int peer, const std::string& what) {
  if (result == WaitResult::Timeout) {
    throw TransportError(TransportError::Why::Timeout, peer, what + " within the deadline");
  }
  if (result == WaitResult::Closed) {
    throw TransportError(TransportError::Why::Aborted, TransportError::kNoPeer, shared.abort_reason());
  }
}

class ThreadWork : public Work {
 public:
  // `devices` are those on which the member uses the results, from the point on that is stored in `ended`.
  ThreadWork(std::shared_ptr<Shared> shared, std::shared_ptr<Rounds> rounds, std::uint64_t round,
             std::vector<at::Device> devices, std::shared_ptr<const StreamPoint> ended)
      : shared_(std::move(shared)),
        rounds_(std::move(rounds)),
        round_(round),
        devices_(std::move(devices)),
        ended_(std::move(ended)) {}

  void wait(Deadline deadline) override {
    require_ready(rounds_->wait(round_, deadline), *shared_, TransportError::kNoPeer,
                  "not all ranks of a group have arrived");
    ended_->block(devices_);
  }

 private:
  std::shared_ptr<Shared> shared_;
  std::shared_ptr<Rounds> rounds_;
  std::uint64_t round_;
  std::vector<at::Device> devices_;
  std::shared_ptr<const StreamPoint> ended_;
};

void require_same_sizes(const std::vector<Contribution>& contributions, const char* collective) {
  const Tensors& first = contributions.front().tensors;
  for (const Contribution& contribution : contributions) {
    const bool are_same = std::equal(first.begin(), first.end(), contribution.tensors.begin(),
                                     contribution.tensors.end(), [](const at::Tensor& a, const at::Tensor& b) {
                                       return a.numel() == b.numel() && a.scalar_type() == b.scalar_type();
                                     });
    if (!are_same) {
      throw std::runtime_error(concat(collective, ": the members' tensors have different sizes or types"));
    }
  }
}

void all_reduce(std::vector<Contribution>& contributions) {
  require_same_sizes(contributions, "all_reduce");
  for (std::size_t i = 0; i < contributions.front().tensors.size(); ++i) {
    at::Tensor sum = contributions.front().tensors[i];
    for (std::size_t member = 1; member < contributions.size(); ++member) {
      sum.add_(internal::copied_to(contributions[member].tensors[i], sum.device()).view_as(sum));
    }
    for (std::size_t member = 1; member < contributions.size(); ++member) {
      contributions[member].tensors[i].copy_(sum.view_as(contributions[member].tensors[i]));
    }
  }
}

at::Tensor part_of(const at::Tensor& whole, std::size_t member, std::int64_t length) {
  return whole.view(-1).narrow(0, static_cast<std::int64_t>(member) * length, length);
}

// Each member contributes {whole, part}.
void all_gather(std::vector<Contribution>& contributions) {
  require_same_sizes(contributions, "all_gather");
  for (const Contribution& to : contributions) {
    for (std::size_t from = 0; from < contributions.size(); ++from) {
      const at::Tensor& part = contributions[from].tensors[1];
      part_of(to.tensors[0], from, part.numel()).copy_(part.view(-1));
    }
  }
}

// Each member contributes {part, whole}.
void reduce_scatter(std::vector<Contribution>& contributions) {
  require_same_sizes(contributions, "reduce_scatter");
  for (std::size_t member = 0; member < contributions.size(); ++member) {
    at::Tensor part = contributions[member].tensors[0].view(-1);
    part.copy_(part_of(contributions.front().tensors[1], member, part.numel()));
    for (std::size_t from = 1; from < contributions.size(); ++from) {
      part.add_(internal::copied_to(part_of(contributions[from].tensors[1], member, part.numel()), part.device()));
    }
  }
}

void broadcast(std::vector<Contribution>& contributions, std::size_t root) {
  require_same_sizes(contributions, "broadcast");
  const Tensors& source = contributions[root].tensors;
  for (Contribution& to : contributions) {
    for (std::size_t i = 0; i < source.size(); ++i) {
      if (!to.tensors[i].is_same(source[i])) to.tensors[i].copy_(source[i]);
    }
  }
}

class ThreadGroup : public Group {
 public:
  ThreadGroup(std::shared_ptr<Shared> shared, std::shared_ptr<Rounds> rounds, std::size_t size, std::size_t member)
      : shared_(std::move(shared)), rounds_(std::move(rounds)), size_(size), member_(member) {}

  int size() const override { return static_cast<int>(size_); }
  int member() const override { return static_cast<int>(member_); }

  std::unique_ptr<Work> all_reduce(Tensors tensors) override {
    return arrive(penstock::all_reduce, std::move(tensors));
  }
  std::unique_ptr<Work> all_gather(at::Tensor whole, at::Tensor part) override {
    return arrive(penstock::all_gather, {std::move(whole), std::move(part)});
  }
  std::unique_ptr<Work> reduce_scatter(at::Tensor part, at::Tensor whole) override {
    return arrive(penstock::reduce_scatter, {std::move(part), std::move(whole)});
  }
  std::unique_ptr<Work> broadcast(Tensors tensors, int root) override {
    return arrive(
        [root](std::vector<Contribution>& contributions) {
          penstock::broadcast(contributions, static_cast<std::size_t>(root));
        },
        std::move(tensors));
  }
  std::unique_ptr<Work> barrier() override {
    return arrive([](std::vector<Contribution>&) {}, {});
  }

 private:
  std::unique_ptr<Work> arrive(std::function<void(std::vector<Contribution>&)> collective, Tensors tensors) {
    const c10::AutoGradMode no_grad(false);
    std::vector<at::Device> devices = devices_of(tensors);
    const auto of_thread = RankStreams::devices_of_thread();
    devices.insert(devices.end(), of_thread.begin(), of_thread.end());
    const auto ended = std::make_shared<StreamPoint>();
    const std::uint64_t round = rounds_->arrive(member_, {.collective = std::move(collective),
                                                          .tensors = std::move(tensors),
                                                          .computed = StreamPoint::now(devices),
                                                          .ended = ended});
    return std::make_unique<ThreadWork>(shared_, rounds_, round, std::move(devices), ended);
  }

  std::shared_ptr<Shared> shared_;
  std::shared_ptr<Rounds> rounds_;
  std::size_t size_;
  std::size_t member_;
};

// A mailbox key has 16 bits for the sender, 24 for the channel and 24 for the number.
constexpr int kMostRanks = 1 << 16;
constexpr std::uint32_t kLargestInTag = (1U << 24U) - 1;

std::uint64_t mailbox_key(int from, Tag tag) {
  internal::require_tag_within(tag, kLargestInTag);
  return (static_cast<std::uint64_t>(from) << 48U) | (static_cast<std::uint64_t>(tag.channel) << 24U) | tag.number;
}

class ThreadTransport : public Transport {
 public:
  ThreadTransport(std::shared_ptr<Shared> shared, int rank) : shared_(std::move(shared)), rank_(rank) {}

  int rank() const override { return rank_; }
  int ranks() const override { return shared_->ranks(); }

  // Tensors are moved by their handles, and a send returns when its message is in the receiver's mailbox: there are no
  // shapes to send and nothing is in flight. The receiver copies what lies on another device than it wants.
  void begin_step(std::uint64_t /*signature*/) override {}
  void end_step(Deadline /*deadline*/) override {}

  void post_receive(int from, Tag tag, at::Device device) override {
    if (!device.is_cpu()) devices_.insert_or_assign({from, tag.channel}, device);
    shared_->mailbox_of(rank_).open(mailbox_key(from, tag));
  }

  void send(int to, Tag tag, Message message, Deadline deadline) override {
    const std::uint64_t key = mailbox_key(rank_, tag);
    waiting_for_.store(to, std::memory_order_relaxed);
    const StreamPoint computed = StreamPoint::now(devices_of(message));
    Parcel parcel{.message = std::move(message), .computed = computed};
    require_ready(shared_->mailbox_of(to).put(key, std::move(parcel), deadline), *shared_, to,
                  concat("no receive was posted on rank ", to));
    waiting_for_.store(kNoPeer, std::memory_order_relaxed);
  }

  Message receive(int from, Tag tag, Deadline deadline) override {
    const std::uint64_t key = mailbox_key(from, tag);
    Parcel parcel;
    waiting_for_.store(from, std::memory_order_relaxed);
    require_ready(shared_->mailbox_of(rank_).take(key, parcel, deadline), *shared_, from,
                  concat("no message came from rank ", from));
    const auto wanted = devices_.find({from, tag.channel});
    const at::Device device = wanted == devices_.end() ? at::kCPU : wanted->second;
    require_ready(move_to_device(parcel.message, device, parcel.computed, copies_, deadline) ? WaitResult::Ready
                                                                                             : WaitResult::Timeout,
                  *shared_, from, concat("the device of rank ", from, " has not computed its message"));
    waiting_for_.store(kNoPeer, std::memory_order_relaxed);
    return std::move(parcel.message);
  }

  int waiting_for() const override { return waiting_for_.load(std::memory_order_relaxed); }

  std::shared_ptr<Group> group(const std::vector<int>& ranks, const std::vector<at::Device>& /*devices*/) override {
    const auto self = std::find(ranks.begin(), ranks.end(), rank_);
    if (self == ranks.end()) {
      throw std::invalid_argument(concat("rank ", rank_, " is not a member of the group that it asks for"));
    }
    return std::make_shared<ThreadGroup>(shared_, shared_->rounds_of(ranks, group_counts_[ranks]++), ranks.size(),
                                         static_cast<std::size_t>(self - ranks.begin()));
  }

  void abort(const std::string& why) noexcept override { shared_->abort(why); }
  void on_abort(std::function<std::string()> report) override { shared_->on_abort(rank_, std::move(report)); }
  std::vector<std::optional<std::string>> reports(Deadline /*deadline*/) override { return shared_->reports(); }

 private:
  std::shared_ptr<Shared> shared_;
  const int rank_;
  // Written by the rank's thread, read by any.
  std::atomic<int> waiting_for_ = kNoPeer;
  // Number of groups that this rank has created of each list of ranks. Used by the rank's thread.
  std::map<std::vector<int>, std::size_t> group_counts_;
  // Devices on which messages are wanted, by sender and channel; the CPU if there is none. Used by the rank's thread, as
  // the streams are.
  std::map<std::pair<int, std::uint32_t>, at::Device> devices_;
  CopyStreams copies_;
};

}  // namespace

std::vector<std::unique_ptr<Transport>> thread_transports(int ranks) {
  if (ranks > kMostRanks) {
    throw std::invalid_argument(concat("there are ", ranks, " thread ranks, expected ", kMostRanks, " at most."));
  }
  const auto shared = std::make_shared<Shared>(ranks);
  std::vector<std::unique_ptr<Transport>> transports;
  for (int rank = 0; rank < ranks; ++rank) transports.push_back(std::make_unique<ThreadTransport>(shared, rank));
  return transports;
}

}  // namespace penstock
