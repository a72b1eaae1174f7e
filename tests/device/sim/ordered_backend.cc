#include "tests/device/sim/ordered_backend.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/device/sim/ordered_wire.h"
#include "tests/device/sim/simulation.h"

namespace penstock::sim {
namespace {

using c10d::OpType;
using Channel = OrderedWire::Channel;

class OrderedWork final : public c10d::Work {
 public:
  OrderedWork(std::shared_ptr<OrderedWire> wire, OpType type, std::shared_ptr<EventPoint> end, c10::DeviceIndex device,
              std::shared_ptr<std::atomic<bool>> succeeded, std::vector<at::Tensor> tensors)
      : Work(wire->rank(), type),
        wire_(std::move(wire)),
        end_(std::move(end)),
        device_(device),
        succeeded_(std::move(succeeded)),
        tensors_(std::move(tensors)) {}

  bool isCompleted() override { return failed() || Simulation::get().query(end_); }
  bool isSuccess() const override {
    TORCH_CHECK(false, "isSuccess() is deprecated for this backend.\n  Hint: use isCompleted() and exception().");
  }
  std::exception_ptr exception() const override {
    try {
      if (failed()) wire_->check();
    } catch (const std::exception&) {
      return std::current_exception();
    }
    return nullptr;
  }
  void synchronize() override {
    if (failed()) wire_->check();
    const c10::Stream stream = current_stream(device_);
    Simulation::get().block(stream, end_);
    if (retrieveOpType() == OpType::BARRIER) Simulation::get().wait(stream);
    const std::lock_guard lock(tensors_mutex_);
    tensors_.clear();
  }
  void blockCurrentStream() override { synchronize(); }
  bool wait(std::chrono::milliseconds timeout) override {
    synchronize();
    if (timeout == kNoTimeout) return true;
    if (!end_->wait_until(std::chrono::steady_clock::now() + timeout)) {
      wire_->abort(opTypeToString(retrieveOpType()) + " timed out after " + std::to_string(timeout.count()) + " ms");
    } else {
      Simulation::get().wait(end_);
    }
    if (!*succeeded_) wire_->check();
    return true;
  }
  void abort() override { wire_->abort("a Work was aborted"); }

 private:
  bool failed() const { return !*succeeded_ && wire_->is_aborted(); }

  const std::shared_ptr<OrderedWire> wire_;
  const std::shared_ptr<EventPoint> end_;
  const c10::DeviceIndex device_;
  const std::shared_ptr<std::atomic<bool>> succeeded_;
  std::mutex tensors_mutex_;
  std::vector<at::Tensor> tensors_;
};

class OrderedBackend final : public c10d::Backend {
 public:
  OrderedBackend(c10::intrusive_ptr<c10d::Backend> inner, c10::Device device, const OrderedOptions& options)
      : Backend(inner->getRank(), inner->getSize()),
        device_(device),
        wire_(std::make_shared<OrderedWire>(std::move(inner), options.connect_timeout, options.operation_timeout)) {
    setBoundDeviceId(device);
  }
  ~OrderedBackend() override { wire_->abort("the backend was destroyed"); }

  const std::string getBackendName() const override { return "sim"; }
  void setTimeout(std::chrono::milliseconds /*timeout*/) override {}
  void abort() override { wire_->abort("abort() was called"); }
  void shutdown() override { wire_->abort("shutdown() was called"); }

  void eagerConnectSingleDevice(at::Device device) override {
    TORCH_CHECK(device == device_, "sim: the backend is for ", device_, ", not for ", device);
    const std::lock_guard lock(mutex_);
    eager_ = true;
    stream_of("all", every_peer(), Channel::All);
  }

  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int peer, int /*tag*/) override {
    const at::Tensor tensor = checked(tensors);
    const Communicator communicator = of_pair(peer);
    return launch(communicator.stream, OpType::SEND, {{&tensor, false}},
                  [wire = wire_, bytes = bytes_of(tensor, /*writes=*/false), peer, channel = communicator.channel] {
                    wire->send(bytes, peer, channel);
                  });
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int peer, int /*tag*/) override {
    const at::Tensor tensor = checked(tensors);
    const Communicator communicator = of_pair(peer);
    return launch(communicator.stream, OpType::RECV, {{&tensor, true}},
                  [wire = wire_, bytes = bytes_of(tensor, /*writes=*/true), peer, channel = communicator.channel] {
                    wire->receive(bytes, peer, channel);
                  });
  }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    const at::Tensor tensor = checked(tensors);
    check_sum(options.reduceOp);
    return collective(
        OpType::ALLREDUCE, {{&tensor, false}, {&tensor, true}}, tensor,
        [result = host_view(tensor, /*writes=*/true)](const std::vector<at::Tensor>& parts) { add_up(parts, result); });
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    const at::Tensor tensor = checked(tensors);
    const auto root = static_cast<std::size_t>(options.rootRank);
    return collective(OpType::BROADCAST, {{&tensor, options.rootRank != getRank()}}, tensor,
                      [root, result = bytes_of(tensor, /*writes=*/true)](const std::vector<at::Tensor>& parts) {
                        result.copy_(parts.at(root));
                      });
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& /*options*/) override {
    check_tensor(output);
    check_tensor(input);
    TORCH_CHECK(output.numel() == input.numel() * getSize() && output.dtype() == input.dtype(),
                "sim: the output of _allgather_base has ", output.numel(), " elements; expected ",
                input.numel() * getSize());
    return collective(OpType::_ALLGATHER_BASE, {{&input, false}, {&output, true}}, input,
                      [result = bytes_of(output, /*writes=*/true)](const std::vector<at::Tensor>& parts) {
                        result.copy_(at::cat(parts));
                      });
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions& options) override {
    check_tensor(output);
    check_tensor(input);
    check_sum(options.reduceOp);
    TORCH_CHECK(input.numel() == output.numel() * getSize() && output.dtype() == input.dtype(),
                "sim: the input of _reduce_scatter_base has ", input.numel(), " elements; expected ",
                output.numel() * getSize());
    return collective(
        OpType::_REDUCE_SCATTER_BASE, {{&input, false}, {&output, true}}, input,
        [result = host_view(output, /*writes=*/true), rank = getRank()](const std::vector<at::Tensor>& parts) {
          const auto bytes = static_cast<std::int64_t>(result.nbytes());
          std::vector<at::Tensor> own;
          for (const at::Tensor& part : parts) own.push_back(part.narrow(0, rank * bytes, bytes));
          add_up(own, result);
        });
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& /*options*/) override {
    const at::Tensor none = at::empty({0}, at::TensorOptions(device_).dtype(at::kByte));
    return collective(OpType::BARRIER, {}, none, [](const std::vector<at::Tensor>& /*parts*/) {});
  }

 private:
  struct Communicator {
    c10::Stream stream;
    Channel channel;
  };

  void check_tensor(const at::Tensor& tensor) const {
    TORCH_CHECK(tensor.device() == device_ && tensor.is_non_overlapping_and_dense(), "sim: a tensor on ",
                tensor.device(), "; expected a dense one on ", device_);
  }
  at::Tensor checked(const std::vector<at::Tensor>& tensors) const {
    TORCH_CHECK(tensors.size() == 1, "sim: ", tensors.size(), " tensors; expected one");
    check_tensor(tensors[0]);
    return tensors[0];
  }
  static void check_sum(const c10d::ReduceOp& op) {
    TORCH_CHECK(op == c10d::ReduceOp::SUM, "sim: only sums are supported");
  }
  // The memory of a dense tensor in its order, whatever its strides.
  static at::Tensor bytes_of(const at::Tensor& tensor, bool writes) {
    return host_view(tensor.as_strided({tensor.numel()}, {1}), writes).view(at::kByte);
  }
  // `parts` are bytes of tensors as `result` is. The sum of n ranks is ((0 + 1) + 2) + ….
  static void add_up(const std::vector<at::Tensor>& parts, const at::Tensor& result) {
    const at::Tensor flat = result.as_strided({result.numel()}, {1});
    at::Tensor sum = parts[0].clone().view(result.scalar_type());
    for (std::size_t i = 1; i < parts.size(); ++i) sum.add_(parts[i].clone().view(result.scalar_type()));
    flat.copy_(sum);
  }

  std::vector<int> every_peer() const {
    std::vector<int> peers;
    for (int rank = 0; rank < getSize(); ++rank) {
      if (rank != getRank()) peers.push_back(rank);
    }
    return peers;
  }
  // Returns the stream of a communicator, which is connected at its first use. The lock is held, as NCCL holds its own.
  c10::Stream stream_of(const std::string& name, const std::vector<int>& peers, Channel channel) {
    if (const auto found = streams_.find(name); found != streams_.end()) return found->second;
    wire_->connect(peers, channel);
    return streams_.emplace(name, Simulation::get().stream_from_pool(device_.index(), /*has_high_priority=*/true))
        .first->second;
  }
  Communicator of_pair(int peer) {
    wire_->check();
    const std::lock_guard lock(mutex_);
    if (eager_) {
      // Two ranks of an eager communicator connect at their first message.
      if (connected_.insert(peer).second) wire_->connect({peer}, Channel::Pair);
      return {stream_of("all", every_peer(), Channel::All), Channel::All};
    }
    const auto [low, high] = std::minmax({peer, getRank()});
    return {stream_of(std::to_string(low) + ":" + std::to_string(high), {peer}, Channel::Pair), Channel::Pair};
  }

  template <class UseParts>
  c10::intrusive_ptr<c10d::Work> collective(OpType type, const std::vector<Use>& uses, const at::Tensor& input,
                                            UseParts use_parts) {
    wire_->check();
    const c10::Stream stream = [this] {
      const std::lock_guard lock(mutex_);
      return stream_of("all", every_peer(), Channel::All);
    }();
    return launch(stream, type, uses,
                  [wire = wire_, bytes = bytes_of(input, /*writes=*/false), type, use_parts = std::move(use_parts)] {
                    use_parts(wire->gather(bytes, static_cast<std::int64_t>(type)));
                  });
  }

  // Launches an operation on a communicator's stream, after the current one. It aborts the backend if it throws.
  template <class Operation>
  c10::intrusive_ptr<c10d::Work> launch(const c10::Stream& stream, OpType type, const std::vector<Use>& uses,
                                        Operation operation) {
    Simulation& simulation = Simulation::get();
    simulation.block(stream, simulation.record(current_stream(device_.index())));
    auto succeeded = std::make_shared<std::atomic<bool>>(false);
    simulation.launch(stream, name_of(type), uses,
                      [wire = wire_, succeeded, operation = std::move(operation)]() mutable {
                        try {
                          operation();
                          *succeeded = true;
                        } catch (const std::exception& error) {
                          wire->abort(error.what());
                        }
                      });
    std::vector<at::Tensor> tensors;
    for (const Use& use : uses) tensors.push_back(*use.tensor);
    return c10::make_intrusive<OrderedWork>(wire_, type, simulation.record(stream), device_.index(),
                                            std::move(succeeded), std::move(tensors));
  }
  // Names live as long as the process.
  static const char* name_of(OpType type) {
    switch (type) {
      case OpType::SEND: return "send";
      case OpType::RECV: return "recv";
      case OpType::ALLREDUCE: return "allreduce";
      case OpType::BROADCAST: return "broadcast";
      case OpType::_ALLGATHER_BASE: return "_allgather_base";
      case OpType::_REDUCE_SCATTER_BASE: return "_reduce_scatter_base";
      default: return "barrier";
    }
  }

  const c10::Device device_;
  const std::shared_ptr<OrderedWire> wire_;
  std::mutex mutex_;
  bool eager_ = false;
  std::set<int> connected_;
  std::map<std::string, c10::Stream> streams_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_ordered_backend(c10::intrusive_ptr<c10d::Backend> inner, c10::Device device,
                                                       const OrderedOptions& options) {
  // A stream that waits for another rank would hold up the process's exit.
  static const int registered = std::atexit(&OrderedWire::abort_all);
  (void)registered;
  TORCH_CHECK(device.type() == kSim && device.has_index(), "sim: ", device, " is not a simulated device");
  return c10::make_intrusive<OrderedBackend>(std::move(inner), device, options);
}

}  // namespace penstock::sim
