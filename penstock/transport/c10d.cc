#include "penstock/transport/c10d.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>
#include <vector>

#include "penstock/tensor/reason.h"
#include "penstock/transport/c10d_group.h"
#include "penstock/transport/child_sockets.h"
#include "penstock/transport/connection_filter.h"
#include "penstock/transport/control_channel.h"
#include "penstock/transport/exit_hook.h"
#include "penstock/transport/receive_queue.h"
#include "penstock/transport/send_queue.h"

namespace penstock {
namespace {

constexpr std::chrono::milliseconds kDefaultTimeout = std::chrono::seconds(60);

// What was sent and not waited for gets this long when a transport ends.
constexpr Clock::duration kLastSends = std::chrono::milliseconds(200);

using Store = c10::intrusive_ptr<c10d::Store>;

std::string list_text(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text.append(text.empty() ? "" : ",").append(std::to_string(rank));
  return text;
}

// The groups that a verdict has to end.
class Groups {
 public:
  void add(const std::shared_ptr<C10dGroup>& group) {
    const std::lock_guard lock(mutex_);
    std::erase_if(groups_, [](const auto& one) { return one.expired(); });
    groups_.push_back(group);
  }
  void tear_down() {
    std::vector<std::shared_ptr<C10dGroup>> alive;
    {
      const std::lock_guard lock(mutex_);
      for (const auto& one : groups_) {
        if (auto group = one.lock()) alive.push_back(std::move(group));
      }
    }
    for (const auto& group : alive) group->tear_down();
  }

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<C10dGroup>> groups_;
};

class C10dTransport : public Transport {
 public:
  C10dTransport(Store store, int rank, int ranks, C10dOptions options)
      : store_(std::move(store)),
        rank_(rank),
        ranks_(ranks),
        timeout_(options.timeout.value_or(kDefaultTimeout)),
        backends_(options.backends ? std::move(options.backends) : gloo_backends({.timeout = timeout_})),
        pool_(options.pool ? std::move(options.pool) : BlockPool::make()),
        control_(std::make_shared<ControlChannel>(make_backend("control", rank, ranks),
                                                  [groups = groups_] { groups->tear_down(); })),
        data_{make_backend("activations", rank, ranks), make_backend("gradients", rank, ranks)},
        inbox_(*control_, data_, step_, pool_),
        outbox_(*control_, data_, step_) {
    step_.dynamic_shapes = options.dynamic_shapes;
  }

  ~C10dTransport() override {
    at_exit_.reset();
    try {
      outbox_.drain(Clock::now() + kLastSends);
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): nobody will take them
    }
    control_->leave();
  }
  // Ends the threads of this transport, when the process exits. What uses it has ended before.
  void stop() noexcept {
    control_->stop();
    outbox_.stop();
  }
  C10dTransport(const C10dTransport&) = delete;
  C10dTransport& operator=(const C10dTransport&) = delete;

  int rank() const override { return rank_; }
  int ranks() const override { return ranks_; }

  void begin_step(std::uint64_t signature) override {
    ++step_.number;
    step_.changed = step_.number == 1 || signature != step_.signature;
    step_.signature = signature;
    inbox_.begin_step();
    outbox_.begin_step();
    pool_->turn();
  }
  void end_step(Deadline deadline) override { outbox_.drain(deadline); }

  void post_receive(int from, Tag tag) override {
    require_other(from);
    inbox_.post(from, tag);
  }
  void send(int to, Tag tag, Message message, Deadline deadline) override {
    require_other(to);
    outbox_.send(to, tag, message, deadline);
  }
  Message receive(int from, Tag tag, Deadline deadline) override {
    require_other(from);
    return inbox_.receive(from, tag, deadline);
  }

  int waiting_for() const override { return step_.waiting_for.load(std::memory_order_relaxed); }

  std::shared_ptr<Group> group(const std::vector<int>& ranks) override {
    const auto own = std::find(ranks.begin(), ranks.end(), rank_);
    if (own == ranks.end()) {
      throw std::invalid_argument("rank " + std::to_string(rank_) + " is not in the group that it asks for");
    }
    control_->throw_if_aborted();
    const std::string name = "group/" + list_text(ranks) + "/" + std::to_string(counts_[ranks]++);
    try {
      auto group = std::make_shared<C10dGroup>(
          control_, make_backend(name, static_cast<int>(own - ranks.begin()), static_cast<int>(ranks.size())));
      groups_->add(group);
      return group;
    } catch (const TransportError&) {
      // Why somebody did not come is known, perhaps.
      control_->throw_if_aborted();
      throw;
    }
  }

  void abort(const std::string& why) noexcept override { control_->abort(why); }
  void on_abort(std::function<std::string()> report) override { control_->on_abort(std::move(report)); }
  std::vector<std::optional<std::string>> reports(Deadline deadline) override { return control_->reports(deadline); }

 private:
  // None for a group of one.
  c10::intrusive_ptr<c10d::Backend> make_backend(const std::string& name, int member, int size) {
    if (size == 1) return {};
    try {
      auto backend = backends_(c10::make_intrusive<c10d::PrefixStore>(name, store_), member, size);
      // From now on deadlines are ours.
      backend->setTimeout(kForever);
      return backend;
    } catch (const std::exception& error) {
      const std::string what = reason_of(error);
      throw TransportError(TransportError::Why::Timeout, TransportError::kNoPeer,
                           "rank " + std::to_string(rank_) + " has not connected to the other " +
                               std::to_string(size - 1) + " ranks of " + name + ": " + what.substr(0, what.find('\n')));
    }
  }

  void require_other(int peer) const {
    if (peer >= 0 && peer < ranks_ && peer != rank_) return;
    throw std::invalid_argument("rank " + std::to_string(rank_) + " of " + std::to_string(ranks_) +
                                " has no connection to rank " + std::to_string(peer) + ".");
  }

  Store store_;
  int rank_;
  int ranks_;
  std::chrono::milliseconds timeout_;
  BackendFactory backends_;
  std::shared_ptr<BlockPool> pool_;
  std::shared_ptr<Groups> groups_ = std::make_shared<Groups>();
  std::map<std::vector<int>, std::size_t> counts_;
  std::shared_ptr<ControlChannel> control_;
  DataBackends data_;
  Step step_;
  // What is under way goes before the groups that it is under way in.
  ReceiveQueue inbox_;
  SendQueue outbox_;
  std::optional<ExitHook> at_exit_{std::in_place, [this] { stop(); }};
};

}  // namespace

std::unique_ptr<Transport> c10d_transport(c10::intrusive_ptr<c10d::Store> store, int rank, int ranks,
                                          C10dOptions options) {
  auto own = require_all_ranks(store, {.rank = rank,
                                       .ranks = ranks,
                                       .token = options.token,
                                       .agreed = options.agreed,
                                       .timeout = options.timeout.value_or(kDefaultTimeout),
                                       .on_waiting = options.on_waiting});
  return std::make_unique<C10dTransport>(std::move(own), rank, ranks, std::move(options));
}

std::unique_ptr<Transport> c10d_transport(const Rendezvous& place, C10dOptions options) {
  if (!options.timeout) options.timeout = place.timeout;
  if (!options.on_waiting) options.on_waiting = place.on_waiting;
  if (options.token.secret().empty()) options.token = place.token;
  if (!options.backends) {
    options.backends =
        gloo_backends({.interface = place.interface, .address = place.address, .timeout = *options.timeout});
  }
  auto transport = c10d_transport(place.store, place.rank, place.ranks, std::move(options));
  // All ranks are connected to the store by now, and nobody else has to be.
  if (place.served_port != 0) {
    close_port_in_children(place.served_port);
    const ConnectionFilter refused(sockets_listening_on(place.served_port));
  }
  return transport;
}

}  // namespace penstock
