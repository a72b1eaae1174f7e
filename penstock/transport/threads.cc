#include "penstock/transport/threads.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "penstock/transport/collective_round.h"
#include "penstock/transport/mailbox.h"

namespace penstock {
namespace {

using Tensors = std::vector<at::Tensor>;

// What one member brings to a collective: what to do with everybody's, and its own tensors.
struct Contribution {
  std::function<void(std::vector<Contribution>&)> act;
  Tensors tensors;
};
using ThreadMeeting = CollectiveRound<Contribution>;

// Long enough for a rank that is about to answer, and short beside a switch to another thread.
constexpr Clock::duration kAwake = std::chrono::microseconds(50);

Clock::duration awake_with(int ranks) {
  return static_cast<unsigned>(ranks) <= std::thread::hardware_concurrency() ? kAwake : Clock::duration::zero();
}

// All that the ranks have in common.
struct Shared {
  explicit Shared(int count) : awake(awake_with(count)), reporters_(static_cast<std::size_t>(count)) {
    reports_.reserve(reporters_.size());
    for (int i = 0; i < count; ++i) boxes.emplace_back(awake);
  }

  std::shared_ptr<ThreadMeeting> meeting(const std::vector<int>& ranks, std::size_t number);
  void abort(const std::string& reason);
  std::string abort_reason();
  void on_abort(int rank, std::function<std::string()> report);
  std::vector<std::optional<std::string>> reports();

  const Clock::duration awake;
  // By receiver.
  std::deque<Mailbox<Message>> boxes;

 private:
  std::mutex mutex_;
  bool aborted_ = false;
  std::string reason_;
  // By rank.
  std::vector<std::function<std::string()>> reporters_;
  std::vector<std::optional<std::string>> reports_;
  // By the ranks of a group, and which of the groups of just these ranks it is.
  std::map<std::pair<std::vector<int>, std::size_t>, std::shared_ptr<ThreadMeeting>> meetings_;
};

std::shared_ptr<ThreadMeeting> Shared::meeting(const std::vector<int>& ranks, std::size_t number) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<ThreadMeeting>& found = meetings_[{ranks, number}];
  if (!found) {
    found = std::make_shared<ThreadMeeting>(ranks.size(), awake,
                                            [](std::vector<Contribution>& all) { all.front().act(all); });
    if (aborted_) found->close();
  }
  return found;
}

void Shared::abort(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  if (aborted_) return;
  aborted_ = true;
  // The others are told even when there is no memory to say why.
  try {
    reason_ = reason;
    for (const auto& report : reporters_) reports_.emplace_back(report ? report() : "");
  } catch (const std::bad_alloc&) {
    reports_.resize(reporters_.size());
  }
  for (Mailbox<Message>& box : boxes) box.close();
  for (const auto& [key, meeting] : meetings_) meeting->close();
}

std::string Shared::abort_reason() {
  const std::lock_guard lock(mutex_);
  return reason_;
}

void Shared::on_abort(int rank, std::function<std::string()> report) {
  const std::lock_guard lock(mutex_);
  reporters_[static_cast<std::size_t>(rank)] = std::move(report);
}

std::vector<std::optional<std::string>> Shared::reports() {
  const std::lock_guard lock(mutex_);
  return reports_;
}

// Throws unless what was waited for is there.
void require_ready(WaitResult waited, Shared& shared, int peer, const std::string& what) {
  if (waited == WaitResult::Timeout)
    throw TransportError(TransportError::Why::Timeout, peer, what + " within the deadline");
  if (waited == WaitResult::Closed) {
    throw TransportError(TransportError::Why::Aborted, TransportError::kNoPeer, shared.abort_reason());
  }
}

class ThreadWork : public Work {
 public:
  ThreadWork(std::shared_ptr<Shared> shared, std::shared_ptr<ThreadMeeting> meeting, std::uint64_t number)
      : shared_(std::move(shared)), meeting_(std::move(meeting)), number_(number) {}

  void wait(Deadline deadline) override {
    require_ready(meeting_->wait(number_, deadline), *shared_, TransportError::kNoPeer,
                  "not all ranks of a group have come");
  }

 private:
  std::shared_ptr<Shared> shared_;
  std::shared_ptr<ThreadMeeting> meeting_;
  std::uint64_t number_;
};

void require_same_sizes(const std::vector<Contribution>& all, const char* what) {
  const Tensors& first = all.front().tensors;
  for (const Contribution& one : all) {
    const bool same = std::equal(first.begin(), first.end(), one.tensors.begin(), one.tensors.end(),
                                 [](const at::Tensor& a, const at::Tensor& b) {
                                   return a.numel() == b.numel() && a.scalar_type() == b.scalar_type();
                                 });
    if (!same) throw std::runtime_error(std::string(what) + ": the members' tensors have different sizes or types");
  }
}

void add_up(std::vector<Contribution>& all) {
  require_same_sizes(all, "all_reduce");
  for (std::size_t i = 0; i < all.front().tensors.size(); ++i) {
    at::Tensor sum = all.front().tensors[i];
    for (std::size_t member = 1; member < all.size(); ++member) sum.add_(all[member].tensors[i].view_as(sum));
    for (std::size_t member = 1; member < all.size(); ++member) {
      all[member].tensors[i].copy_(sum.view_as(all[member].tensors[i]));
    }
  }
}

at::Tensor part_of(const at::Tensor& whole, std::size_t member, std::int64_t length) {
  return whole.view(-1).narrow(0, static_cast<std::int64_t>(member) * length, length);
}

// Of {whole, part}.
void gather(std::vector<Contribution>& all) {
  require_same_sizes(all, "all_gather");
  for (const Contribution& to : all) {
    for (std::size_t from = 0; from < all.size(); ++from) {
      const at::Tensor& part = all[from].tensors[1];
      part_of(to.tensors[0], from, part.numel()).copy_(part.view(-1));
    }
  }
}

// Of {part, whole}.
void scatter_sums(std::vector<Contribution>& all) {
  require_same_sizes(all, "reduce_scatter");
  for (std::size_t member = 0; member < all.size(); ++member) {
    at::Tensor part = all[member].tensors[0].view(-1);
    part.copy_(part_of(all.front().tensors[1], member, part.numel()));
    for (std::size_t from = 1; from < all.size(); ++from) {
      part.add_(part_of(all[from].tensors[1], member, part.numel()));
    }
  }
}

class ThreadGroup : public Group {
 public:
  ThreadGroup(std::shared_ptr<Shared> shared, std::shared_ptr<ThreadMeeting> meeting, std::size_t size,
              std::size_t member)
      : shared_(std::move(shared)), meeting_(std::move(meeting)), size_(size), member_(member) {}

  int size() const override { return static_cast<int>(size_); }
  int member() const override { return static_cast<int>(member_); }

  std::unique_ptr<Work> all_reduce(Tensors tensors) override { return bring(add_up, std::move(tensors)); }
  std::unique_ptr<Work> all_gather(at::Tensor whole, at::Tensor part) override {
    return bring(gather, {std::move(whole), std::move(part)});
  }
  std::unique_ptr<Work> reduce_scatter(at::Tensor part, at::Tensor whole) override {
    return bring(scatter_sums, {std::move(part), std::move(whole)});
  }
  std::unique_ptr<Work> broadcast(Tensors tensors, int root) override {
    return bring(
        [root](std::vector<Contribution>& all) {
          require_same_sizes(all, "broadcast");
          const Tensors& source = all[static_cast<std::size_t>(root)].tensors;
          for (Contribution& to : all) {
            for (std::size_t i = 0; i < source.size(); ++i) {
              if (!to.tensors[i].is_same(source[i])) to.tensors[i].copy_(source[i]);
            }
          }
        },
        std::move(tensors));
  }
  std::unique_ptr<Work> barrier() override {
    return bring([](std::vector<Contribution>&) {}, {});
  }

 private:
  std::unique_ptr<Work> bring(std::function<void(std::vector<Contribution>&)> act, Tensors tensors) {
    const c10::AutoGradMode no_grad(false);
    const std::uint64_t number = meeting_->arrive(member_, {.act = std::move(act), .tensors = std::move(tensors)});
    return std::make_unique<ThreadWork>(shared_, meeting_, number);
  }

  std::shared_ptr<Shared> shared_;
  std::shared_ptr<ThreadMeeting> meeting_;
  std::size_t size_;
  std::size_t member_;
};

class ThreadTransport : public Transport {
 public:
  ThreadTransport(std::shared_ptr<Shared> shared, int rank) : shared_(std::move(shared)), rank_(rank) {}

  int rank() const override { return rank_; }
  int ranks() const override { return static_cast<int>(shared_->boxes.size()); }

  // Tensors are handed over as they are, and a send returns when its message is the receiver's.
  void begin_step(std::uint64_t /*signature*/) override {}
  void end_step(Deadline /*deadline*/) override {}

  void post_receive(int from, Tag tag) override { box_of(rank_).open(key_of(from, tag)); }

  void send(int to, Tag tag, Message message, Deadline deadline) override {
    waiting_for_.store(to, std::memory_order_relaxed);
    require_ready(box_of(to).put(key_of(rank_, tag), std::move(message), deadline), *shared_, to,
                  "no receive was posted on rank " + std::to_string(to));
    waiting_for_.store(kNoPeer, std::memory_order_relaxed);
  }

  Message receive(int from, Tag tag, Deadline deadline) override {
    Message message;
    waiting_for_.store(from, std::memory_order_relaxed);
    require_ready(box_of(rank_).take(key_of(from, tag), message, deadline), *shared_, from,
                  "no message came from rank " + std::to_string(from));
    waiting_for_.store(kNoPeer, std::memory_order_relaxed);
    return message;
  }

  int waiting_for() const override { return waiting_for_.load(std::memory_order_relaxed); }

  std::shared_ptr<Group> group(const std::vector<int>& ranks) override {
    const auto own = std::find(ranks.begin(), ranks.end(), rank_);
    if (own == ranks.end()) {
      throw std::invalid_argument("rank " + std::to_string(rank_) + " is not in the group that it asks for");
    }
    return std::make_shared<ThreadGroup>(shared_, shared_->meeting(ranks, groups_[ranks]++), ranks.size(),
                                         static_cast<std::size_t>(own - ranks.begin()));
  }

  void abort(const std::string& why) noexcept override { shared_->abort(why); }
  void on_abort(std::function<std::string()> report) override { shared_->on_abort(rank_, std::move(report)); }
  std::vector<std::optional<std::string>> reports(Deadline /*deadline*/) override { return shared_->reports(); }

 private:
  Mailbox<Message>& box_of(int rank) { return shared_->boxes.at(static_cast<std::size_t>(rank)); }
  // 16 bits of the sender, 24 of the channel, 24 of the number.
  static std::uint64_t key_of(int from, Tag tag) {
    return (static_cast<std::uint64_t>(from) << 48) | (static_cast<std::uint64_t>(tag.channel) << 24) | tag.number;
  }

  std::shared_ptr<Shared> shared_;
  int rank_;
  std::atomic<int> waiting_for_ = kNoPeer;
  std::map<std::vector<int>, std::size_t> groups_;
};

}  // namespace

std::vector<std::unique_ptr<Transport>> thread_transports(int ranks) {
  const auto shared = std::make_shared<Shared>(ranks);
  std::vector<std::unique_ptr<Transport>> transports;
  for (int rank = 0; rank < ranks; ++rank) transports.push_back(std::make_unique<ThreadTransport>(shared, rank));
  return transports;
}

}  // namespace penstock
