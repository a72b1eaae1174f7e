#include "tests/device/sim/ordered_wire.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>

#include <array>
#include <utility>

namespace penstock::sim {
namespace {

// Tags of the inner backend. The direction of a transfer is part of them, so that two sends do not meet.
enum Tag : int { kConnect = 0, kSize = 2, kData = 8, kCollective = 16, kCollectiveData = 17 };

int channel_tag(Tag tag, OrderedWire::Channel channel) {
  return tag + (channel == OrderedWire::Channel::All ? 1 : 0);
}

int direction_tag(Tag tag, OrderedWire::Channel channel, int from, int to) {
  return channel_tag(tag, channel) + (from < to ? 0 : 2);
}

// All wires of the process.
struct Registry {
  std::mutex mutex;
  std::set<OrderedWire*> wires;
};
Registry& registry() {
  static auto* const instance = new Registry;
  return *instance;
}

}  // namespace

OrderedWire::OrderedWire(c10::intrusive_ptr<c10d::Backend> inner, std::chrono::milliseconds connect_timeout,
                         std::chrono::milliseconds operation_timeout)
    : inner_(std::move(inner)), connect_timeout_(connect_timeout), operation_timeout_(operation_timeout) {
  const std::lock_guard lock(registry().mutex);
  registry().wires.insert(this);
}

OrderedWire::~OrderedWire() {
  const std::lock_guard lock(registry().mutex);
  registry().wires.erase(this);
}

void OrderedWire::abort_all() {
  const std::lock_guard lock(registry().mutex);
  for (OrderedWire* wire : registry().wires) wire->abort("the process exits");
}

void OrderedWire::check() {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK_WITH(DistBackendError, !aborted_, "sim: the communicator was aborted: ", reason_);
}

bool OrderedWire::is_aborted() {
  const std::lock_guard lock(mutex_);
  return aborted_;
}

void OrderedWire::abort(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  if (aborted_) return;
  aborted_ = true;
  reason_ = reason;
  for (c10d::Work* work : in_flight_) work->abort();
}

OrderedWire::Transfer OrderedWire::post_send(const at::Tensor& tensor, int peer, int tag) {
  check();
  std::vector<at::Tensor> tensors{tensor};
  return {inner_->send(tensors, peer, tag), tensor};
}

OrderedWire::Transfer OrderedWire::post_receive(const at::Tensor& tensor, int peer, int tag) {
  check();
  std::vector<at::Tensor> tensors{tensor};
  return {inner_->recv(tensors, peer, tag), tensor};
}

void OrderedWire::finish(const Transfer& transfer, std::chrono::milliseconds timeout) {
  bool waits = false;
  {
    const std::lock_guard lock(mutex_);
    waits = !aborted_;
    if (waits) {
      in_flight_.insert(transfer.work.get());
    } else {
      unfinished_.push_back(transfer);
    }
  }
  if (waits) {
    std::string failure;
    try {
      // Returns false if the Work was aborted.
      if (!transfer.work->wait(timeout)) failure = "a transfer was aborted";
    } catch (const std::exception& error) {
      failure = error.what();
    }
    {
      const std::lock_guard lock(mutex_);
      in_flight_.erase(transfer.work.get());
      if (!failure.empty()) unfinished_.push_back(transfer);
    }
    if (!failure.empty()) abort(failure);
  }
  check();
}

void OrderedWire::agree(int peer, int tag, const std::array<std::int64_t, 2>& numbers) {
  const at::Tensor own = at::tensor(c10::ArrayRef<std::int64_t>(numbers));
  const at::Tensor other = at::empty_like(own);
  const Transfer received = post_receive(other, peer, tag);
  const Transfer sent = post_send(own, peer, tag);
  finish(sent, operation_timeout_);
  finish(received, operation_timeout_);
  const auto* const values = other.const_data_ptr<std::int64_t>();
  TORCH_CHECK_WITH(DistBackendError, values[0] == numbers[0], "sim: rank ", rank(), " calls collective ", numbers[0],
                   " while rank ", peer, " calls ", values[0]);
  TORCH_CHECK_WITH(DistBackendError, values[1] == numbers[1], "sim: rank ", rank(), " transfers ", numbers[1],
                   " bytes while rank ", peer, " transfers ", values[1]);
}

void OrderedWire::connect(const std::vector<int>& peers, Channel channel) {
  const int tag = channel_tag(kConnect, channel);
  std::vector<Transfer> transfers;
  for (const int peer : peers) transfers.push_back(post_receive(at::empty({1}, at::kByte), peer, tag));
  for (const int peer : peers) transfers.push_back(post_send(at::empty({1}, at::kByte), peer, tag));
  for (const Transfer& transfer : transfers) finish(transfer, connect_timeout_);
}

void OrderedWire::send(const at::Tensor& bytes, int peer, Channel channel) {
  agree(peer, direction_tag(kSize, channel, rank(), peer), {0, bytes.numel()});
  if (bytes.numel() == 0) return;
  finish(post_send(bytes, peer, direction_tag(kData, channel, rank(), peer)), operation_timeout_);
}

void OrderedWire::receive(at::Tensor bytes, int peer, Channel channel) {
  agree(peer, direction_tag(kSize, channel, peer, rank()), {0, bytes.numel()});
  if (bytes.numel() == 0) return;
  // An aborted receive may still write to its memory, which the device may have reused by then.
  const at::Tensor staged = at::empty_like(bytes);
  finish(post_receive(staged, peer, direction_tag(kData, channel, peer, rank())), operation_timeout_);
  bytes.copy_(staged);
}

std::vector<at::Tensor> OrderedWire::gather(const at::Tensor& bytes, std::int64_t operation) {
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank()) agree(peer, kCollective, {operation, bytes.numel()});
  }
  std::vector<at::Tensor> parts;
  std::vector<Transfer> transfers;
  for (int peer = 0; peer < size(); ++peer) {
    parts.push_back(peer == rank() ? bytes.clone() : at::empty_like(bytes));
    if (peer == rank() || bytes.numel() == 0) continue;
    transfers.push_back(post_receive(parts.back(), peer, kCollectiveData));
  }
  const at::Tensor& own = parts[static_cast<std::size_t>(rank())];
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank() && bytes.numel() > 0) transfers.push_back(post_send(own, peer, kCollectiveData));
  }
  for (const Transfer& transfer : transfers) finish(transfer, operation_timeout_);
  return parts;
}

}  // namespace penstock::sim
