#include "penstock/transport/c10d_transport.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

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
#include "penstock/transport/device_choice.h"
#include "penstock/transport/device_group.h"
#include "penstock/transport/device_operations.h"
#include "penstock/transport/direct_links.h"
#include "penstock/transport/exit_hook.h"
#include "penstock/transport/host_receives.h"
#include "penstock/transport/membership.h"
#include "penstock/transport/receive_queue.h"
#include "penstock/transport/send_queue.h"
#include "penstock/transport/staged_group.h"

namespace penstock::internal {
namespace {

constexpr std::chrono::milliseconds kDefaultTimeout = std::chrono::seconds(60);

// Time that messages in flight have to be received when a transport is destroyed.
constexpr Clock::duration kLastSends = std::chrono::milliseconds(200);
// Time that the devices of other ranks have for those from device to device.
constexpr Clock::duration kLastReceives = std::chrono::seconds(2);

using Store = c10::intrusive_ptr<c10d::Store>;

// The operations that an abort has to end. Thread-safe: an abort may come from any thread.
class AbortTargets {
 public:
  void add(const std::shared_ptr<DeviceOperations>& operations) PENSTOCK_EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    operations_ = operations;
  }
  void add(const std::shared_ptr<C10dGroup>& group) PENSTOCK_EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    std::erase_if(groups_, [](const auto& known) { return known.expired(); });
    groups_.push_back(group);
  }
  void tear_down() PENSTOCK_EXCLUDES(mutex_) {
    std::vector<std::shared_ptr<C10dGroup>> alive;
    std::shared_ptr<DeviceOperations> operations;
    {
      const MutexLock lock(mutex_);
      operations = operations_.lock();
      for (const auto& known : groups_) {
        if (auto group = known.lock()) alive.push_back(std::move(group));
      }
    }
    if (operations) operations->abort();
    for (const auto& group : alive) group->tear_down();
  }

 private:
  // A leaf lock: groups are torn down after it is released.
  Mutex mutex_;
  std::vector<std::weak_ptr<C10dGroup>> groups_ PENSTOCK_GUARDED_BY(mutex_);
  std::weak_ptr<DeviceOperations> operations_ PENSTOCK_GUARDED_BY(mutex_);
};

class C10dTransport : public Transport {
 public:
  C10dTransport(Store store, int rank, int ranks, C10dOptions options, std::shared_ptr<BlockPool> pool)
      : store_(std::move(store)),
        rank_(rank),
        ranks_(ranks),
        timeout_(options.timeout.value_or(kDefaultTimeout)),
        backends_(options.backends ? std::move(options.backends) : gloo_backends({.timeout = timeout_})),
        device_backends_(std::move(options.device_backends.create)),
        pool_(std::move(pool)),
        control_(std::make_shared<ControlChannel>(make_backend("control", rank, ranks),
                                                  [targets = abort_targets_] { targets->tear_down(); })),
        data_{.backends = {make_backend("activations", rank, ranks), make_backend("gradients", rank, ranks)}},
        operations_(std::make_shared<DeviceOperations>(control_)),
        links_(rank, *operations_, timeout_,
               [this](const std::string& name, int member, at::Device device) {
                 return make_device_backend(name, member, /*size=*/2, device);
               }),
        host_receives_(*control_, data_, step_, pool_),
        receives_(*control_, host_receives_, step_, links_, *operations_),
        sends_(*control_, data_, step_, links_, *operations_) {
    step_.dynamic_shapes = options.dynamic_shapes;
    abort_targets_->add(operations_);
  }

  ~C10dTransport() override {
    exit_hook_.reset();
    try {
      sends_.drain(Clock::now() + kLastSends);
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): no peer will receive them
    }
    finish_operations();
    control_->leave();
    operations_->stop(receives_.has_posted_directly());
  }
  C10dTransport(const C10dTransport&) = delete;
  C10dTransport& operator=(const C10dTransport&) = delete;

  int rank() const override { return rank_; }
  int ranks() const override { return ranks_; }

  void begin_step(std::uint64_t signature) override {
    // A step that fails aborts what is in flight, which must not be the messages of the step before.
    if (has_order_) {
      operations_->drain(Clock::now() + kLastSends);
      control_->throw_if_aborted();
    }
    ++step_.number;
    step_.changed = step_.number == 1 || signature != step_.signature;
    step_.signature = signature;
    links_.begin_step();
    operations_->begin_step();
    receives_.begin_step();
    sends_.begin_step();
    pool_->begin_step();
  }
  void end_step(Deadline deadline) override {
    sends_.drain(deadline);
    if (!has_order_) return;
    const StreamPoint end = StreamPoint::now(RankStreams::devices_of_thread());
    operations_->end_step(end, deadline);
    synchronise_hosts(end, deadline - Clock::now());
  }

  bool needs_order() const override { return static_cast<bool>(device_backends_); }
  void set_order(const std::shared_ptr<const MessageOrder>& order) override {
    if (!device_backends_) return;
    control_->throw_if_aborted();
    const bool is_new = links_.set_order(order);
    has_order_ = order != nullptr;
    // A rank whose links are complete may fail in its next step. It serves the store that the others still need, or
    // answers them while they connect, where no deadline of a step ends their waits.
    if (is_new) synchronise_hosts(StreamPoint(), timeout_);
  }

  void post_receive(int from, Tag tag, at::Device device) override {
    require_peer(from);
    receives_.post(from, tag, device);
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
  std::optional<AwaitedMessage> awaited_by_device() const override { return operations_->awaited(); }

  std::shared_ptr<Group> group(const std::vector<int>& ranks, const std::vector<at::Device>& devices) override {
    const auto self = std::find(ranks.begin(), ranks.end(), rank_);
    if (self == ranks.end()) {
      throw std::invalid_argument(concat("rank ", rank_, " is not a member of the group that it asks for"));
    }
    control_->throw_if_aborted();
    const std::string name = concat("group/", join(ranks, ","), '/', group_counts_[ranks]++);
    const int member = static_cast<int>(self - ranks.begin());
    const int size = static_cast<int>(ranks.size());
    try {
      auto group = std::make_shared<C10dGroup>(control_, make_backend(name, member, size));
      abort_targets_->add(group);
      if (device_backends_ && size > 1) {
        if (const std::optional<at::Device> device = device_of_all(*group, devices)) {
          auto on_device = std::make_shared<DeviceGroup>(
              control_, make_device_backend(name + "/direct", member, size, *device), *device, operations_);
          return std::make_shared<DirectGroup>(std::move(group), std::move(on_device));
        }
      }
      auto staged = std::make_shared<StagedGroup>(std::move(group));
      std::erase_if(staged_groups_, [](const auto& known) { return known.expired(); });
      staged_groups_.push_back(staged);
      return staged;
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
  using Backend = c10::intrusive_ptr<c10d::Backend>;

  // Blocks until the hosts of all ranks have ended the step, so that none returns from a step that fails on another one.
  // With tensors on the CPU, messages do this. `end` is the point at which this rank's devices end the step. The others
  // have the timeout from then on: until then they may wait for a device, whose messages have deadlines of their own.
  void synchronise_hosts(const StreamPoint& end, Clock::duration timeout) {
    if (rank_ != 0) {
      sends_.send_end_of_step(0);
      wait_for_end_of_step(0, end, timeout);
      return;
    }
    for (int rank = 1; rank < ranks_; ++rank) wait_for_end_of_step(rank, end, timeout);
    for (int rank = 1; rank < ranks_; ++rank) sends_.send_end_of_step(rank);
  }

  void wait_for_end_of_step(int from, const StreamPoint& end, Clock::duration timeout) {
    HostReceive message = host_receives_.post(from, {}, MessageKind::EndOfStep, 1);
    while (!end.is_reached()) {
      try {
        return host_receives_.wait(message, from, Clock::now() + StagingThread::kPause);
      } catch (const TransportError& error) {
        if (error.why() != TransportError::Why::Timeout) throw;
        // A device operation that was late has set the abort reason, which is a timeout too.
        control_->throw_if_aborted();
      }
    }
    host_receives_.wait(message, from, Clock::now() + timeout);
  }

  // Returns null for a group of one rank.
  Backend make_backend(const std::string& name, int member, int size) {
    if (size == 1) return {};
    Backend backend = connect(name, size, [&](const Store& store) { return backends_(store, member, size); });
    // The deadline of each wait applies from now on.
    backend->setTimeout(kForever);
    return backend;
  }

  Backend make_device_backend(const std::string& name, int member, int size, at::Device device) {
    try {
      const Backend backend =
          connect(name, size, [&](const Store& store) { return device_backends_(store, member, size, device); });
      operations_->add_backend(backend, device);
      return backend;
    } catch (const TransportError& error) {
      throw TransportError(error.why(), error.peer(),
                           concat(error.what(),
                                  "\n  Hint: NCCL_DEBUG=INFO prints what NCCL does. If devices cannot "
                                  "connect, stage tensors in CPU memory."));
    }
  }

  template <class Create>
  Backend connect(const std::string& name, int size, const Create& create) {
    try {
      return create(c10::make_intrusive<c10d::PrefixStore>(name, store_));
    } catch (const std::exception& error) {
      const std::string what = reason_of(error);
      throw TransportError(TransportError::Why::Timeout, TransportError::kNoPeer,
                           concat("rank ", rank_, " has not connected to the other ", size - 1, " ranks of ", name,
                                  ": ", what.substr(0, what.find('\n'))));
    }
  }

  // Returns this rank's device if each member of the group has one, and that is an accelerator.
  std::optional<at::Device> device_of_all(C10dGroup& group, const std::vector<at::Device>& devices) {
    const bool has_one = devices.size() == 1 && has_streams(devices.front());
    at::Tensor all = at::empty({group.size()}, at::kLong);
    group.all_gather(all, at::full({1}, has_one ? 1 : 0, at::kLong))->wait(deadline_after(timeout_));
    if (!all.all().item<bool>()) return std::nullopt;
    return with_index(devices.front());
  }

  void require_peer(int rank) const {
    if (rank >= 0 && rank < ranks_ && rank != rank_) return;
    throw std::invalid_argument(concat("rank ", rank_, " of ", ranks_, " has no connection to rank ", rank, "."));
  }

  // Gives messages between devices time to be received. A small one may have completed here before its receiver has it,
  // which would lose it if this rank aborted its backends.
  void finish_operations() noexcept {
    operations_->drain(Clock::now() + kLastSends);
    if (!has_order_) return;
    try {
      control_->throw_if_aborted();
      synchronise_hosts(StreamPoint(), kLastReceives);
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): a rank that is lost or late receives nothing
    }
  }

  // Ends the threads of this transport when the process exits. The rank's thread does not use it any more.
  void stop() noexcept {
    for (const auto& known : staged_groups_) {
      if (const auto group = known.lock()) group->stop();
    }
    finish_operations();
    control_->stop();
    sends_.stop();
    operations_->stop(receives_.has_posted_directly());
  }

  Store store_;
  const int rank_;
  const int ranks_;
  const std::chrono::milliseconds timeout_;
  const BackendFactory backends_;
  const DeviceBackendFactory device_backends_;
  const std::shared_ptr<BlockPool> pool_;
  // Shared with the control channel, which groups may keep alive after the transport.
  const std::shared_ptr<AbortTargets> abort_targets_ = std::make_shared<AbortTargets>();
  // Number of groups that this rank has created of each list of ranks.
  std::map<std::vector<int>, std::size_t> group_counts_;
  // Groups whose threads end with the process.
  std::vector<std::weak_ptr<StagedGroup>> staged_groups_;
  const std::shared_ptr<ControlChannel> control_;
  DataBackends data_;
  TransportStep step_;
  const std::shared_ptr<DeviceOperations> operations_;
  DirectLinks links_;
  // True if set_order() has set an order. It is the same on all ranks.
  bool has_order_ = false;
  HostReceives host_receives_;
  // Declared after the backends: messages in flight are destroyed before their process groups.
  ReceiveQueue receives_;
  SendQueue sends_;
  // The last member: it is destroyed first, and calls stop().
  std::optional<ExitHook> exit_hook_{std::in_place, [this] { stop(); }};
};

}  // namespace

std::unique_ptr<Transport> c10d_transport_with_pool(const c10::intrusive_ptr<c10d::Store>& store, int rank, int ranks,
                                                    C10dOptions options, std::shared_ptr<BlockPool> pool) {
  DeviceChoice choice(options.device_backends, options.device_transport);
  if (const std::string asked = choice.asked(); !asked.empty()) options.agreed["device_transport"] = asked;
  auto session = require_all_ranks(store, {.rank = rank,
                                           .ranks = ranks,
                                           .token = JobToken(options.job_token),
                                           .agreed = options.agreed,
                                           .statement = choice.statement(),
                                           .on_statements = [&](const auto& all) { choice.choose(all); },
                                           .timeout = options.timeout.value_or(kDefaultTimeout),
                                           .on_waiting = options.on_waiting});
  if (options.on_device_transport) options.on_device_transport(choice.chosen(), choice.reason());
  if (choice.chosen() == DeviceTransport::Staged) options.device_backends = {};
  return std::make_unique<C10dTransport>(std::move(session), rank, ranks, std::move(options), std::move(pool));
}

}  // namespace penstock::internal
