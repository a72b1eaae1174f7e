#include "penstock/transport/c10d_transport.h"

#include <algorithm>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>
#include <vector>

#include "penstock/base/mutex.h"
#include "penstock/base/text.h"
#include "penstock/tensor/reason.h"
#include "penstock/transport/c10d_group.h"
#include "penstock/transport/control_channel.h"
#include "penstock/transport/exit_hook.h"
#include "penstock/transport/membership.h"
#include "penstock/transport/receive_queue.h"
#include "penstock/transport/send_queue.h"

namespace penstock::internal {
namespace {

constexpr std::chrono::milliseconds kDefaultTimeout = std::chrono::seconds(60);

// Time that messages in flight have to be received when a transport is destroyed.
constexpr Clock::duration kLastSends = std::chrono::milliseconds(200);

using Store = c10::intrusive_ptr<c10d::Store>;

// The groups whose collectives an abort has to end. Thread-safe: an abort may come from any thread.
class Groups {
 public:
  void add(const std::shared_ptr<C10dGroup>& group) PENSTOCK_EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    std::erase_if(groups_, [](const auto& known) { return known.expired(); });
    groups_.push_back(group);
  }
  void tear_down() PENSTOCK_EXCLUDES(mutex_) {
    std::vector<std::shared_ptr<C10dGroup>> alive;
    {
      const MutexLock lock(mutex_);
      for (const auto& known : groups_) {
        if (auto group = known.lock()) alive.push_back(std::move(group));
      }
    }
    for (const auto& group : alive) group->tear_down();
  }

 private:
  // A leaf lock: groups are torn down after it is released.
  Mutex mutex_;
  std::vector<std::weak_ptr<C10dGroup>> groups_ PENSTOCK_GUARDED_BY(mutex_);
};

class C10dTransport : public Transport {
 public:
  C10dTransport(Store store, int rank, int ranks, C10dOptions options, std::shared_ptr<BlockPool> pool)
      : store_(std::move(store)),
        rank_(rank),
        ranks_(ranks),
        timeout_(options.timeout.value_or(kDefaultTimeout)),
        backends_(options.backends ? std::move(options.backends) : gloo_backends({.timeout = timeout_})),
        pool_(std::move(pool)),
        control_(std::make_shared<ControlChannel>(make_backend("control", rank, ranks),
                                                  [groups = groups_] { groups->tear_down(); })),
        data_{make_backend("activations", rank, ranks), make_backend("gradients", rank, ranks)},
        receives_(*control_, data_, step_, pool_),
        sends_(*control_, data_, step_) {
    step_.dynamic_shapes = options.dynamic_shapes;
  }

  ~C10dTransport() override {
    exit_hook_.reset();
    try {
      sends_.drain(Clock::now() + kLastSends);
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): no peer will receive them
    }
    control_->leave();
  }
  C10dTransport(const C10dTransport&) = delete;
  C10dTransport& operator=(const C10dTransport&) = delete;

  int rank() const override { return rank_; }
  int ranks() const override { return ranks_; }

  void begin_step(std::uint64_t signature) override {
    ++step_.number;
    step_.changed = step_.number == 1 || signature != step_.signature;
    step_.signature = signature;
    receives_.begin_step();
    sends_.begin_step();
    pool_->begin_step();
  }
  void end_step(Deadline deadline) override { sends_.drain(deadline); }

  void post_receive(int from, Tag tag) override {
    require_peer(from);
    receives_.post(from, tag);
  }
  void send(int to, Tag tag, Message message, Deadline deadline) override {
    require_peer(to);
    sends_.send(to, tag, message, deadline);
  }
  Message receive(int from, Tag tag, Deadline deadline) override {
    require_peer(from);
    return receives_.receive(from, tag, deadline);
  }

  int waiting_for() const override { return step_.waiting_for.load(std::memory_order_relaxed); }

  std::shared_ptr<Group> group(const std::vector<int>& ranks) override {
    const auto self = std::find(ranks.begin(), ranks.end(), rank_);
    if (self == ranks.end()) {
      throw std::invalid_argument(concat("rank ", rank_, " is not a member of the group that it asks for"));
    }
    control_->throw_if_aborted();
    const std::string name = concat("group/", join(ranks, ","), '/', group_counts_[ranks]++);
    try {
      auto group = std::make_shared<C10dGroup>(
          control_, make_backend(name, static_cast<int>(self - ranks.begin()), static_cast<int>(ranks.size())));
      groups_->add(group);
      return group;
    } catch (const TransportError&) {
      // An abort reason explains why a member did not connect.
      control_->throw_if_aborted();
      throw;
    }
  }

  void abort(const std::string& why) noexcept override { control_->abort(why); }
  void on_abort(std::function<std::string()> report) override { control_->on_abort(std::move(report)); }
  std::vector<std::optional<std::string>> reports(Deadline deadline) override { return control_->reports(deadline); }

 private:
  // Returns null for a group of one rank.
  c10::intrusive_ptr<c10d::Backend> make_backend(const std::string& name, int member, int size) {
    if (size == 1) return {};
    try {
      auto backend = backends_(c10::make_intrusive<c10d::PrefixStore>(name, store_), member, size);
      // The deadline of each wait applies from now on.
      backend->setTimeout(kForever);
      return backend;
    } catch (const std::exception& error) {
      const std::string what = reason_of(error);
      throw TransportError(TransportError::Why::Timeout, TransportError::kNoPeer,
                           concat("rank ", rank_, " has not connected to the other ", size - 1, " ranks of ", name,
                                  ": ", what.substr(0, what.find('\n'))));
    }
  }

  void require_peer(int rank) const {
    if (rank >= 0 && rank < ranks_ && rank != rank_) return;
    throw std::invalid_argument(concat("rank ", rank_, " of ", ranks_, " has no connection to rank ", rank, "."));
  }

  // Ends the threads of this transport when the process exits. The rank's thread does not use it any more.
  void stop() noexcept {
    control_->stop();
    sends_.stop();
  }

  Store store_;
  const int rank_;
  const int ranks_;
  const std::chrono::milliseconds timeout_;
  const BackendFactory backends_;
  const std::shared_ptr<BlockPool> pool_;
  // Shared with the control channel, which groups may keep alive after the transport.
  const std::shared_ptr<Groups> groups_ = std::make_shared<Groups>();
  // Number of groups that this rank has created of each list of ranks.
  std::map<std::vector<int>, std::size_t> group_counts_;
  const std::shared_ptr<ControlChannel> control_;
  const DataBackends data_;
  TransportStep step_;
  // Declared after the backends: messages in flight are destroyed before their process groups.
  ReceiveQueue receives_;
  SendQueue sends_;
  // The last member: it is destroyed first, and calls stop().
  std::optional<ExitHook> exit_hook_{std::in_place, [this] { stop(); }};
};

}  // namespace

std::unique_ptr<Transport> c10d_transport_with_pool(const c10::intrusive_ptr<c10d::Store>& store, int rank, int ranks,
                                                    C10dOptions options, std::shared_ptr<BlockPool> pool) {
  auto session = require_all_ranks(store, {.rank = rank,
                                           .ranks = ranks,
                                           .token = JobToken(options.job_token),
                                           .agreed = options.agreed,
                                           .timeout = options.timeout.value_or(kDefaultTimeout),
                                           .on_waiting = options.on_waiting});
  return std::make_unique<C10dTransport>(std::move(session), rank, ranks, std::move(options), std::move(pool));
}

}  // namespace penstock::internal
