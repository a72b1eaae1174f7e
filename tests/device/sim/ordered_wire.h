// Transfers the bytes of ordered_backend.h over a backend for CPU tensors. Its functions block, mostly the thread of a
// stream, until the other ranks have called theirs.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <set>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

namespace penstock::sim {

// Thread-safe. Every function throws c10::DistBackendError if the wire was aborted, before or meanwhile.
class OrderedWire {
 public:
  // Point-to-point operations of different channels do not meet.
  enum class Channel : std::uint8_t { Pair, All };

  OrderedWire(c10::intrusive_ptr<c10d::Backend> inner, std::chrono::milliseconds connect_timeout,
              std::chrono::milliseconds operation_timeout);
  ~OrderedWire();
  OrderedWire(const OrderedWire&) = delete;
  OrderedWire& operator=(const OrderedWire&) = delete;

  int rank() const { return inner_->getRank(); }
  int size() const { return inner_->getSize(); }

  // Blocks until these ranks have called connect() for the same channel. Aborts at the timeout.
  void connect(const std::vector<int>& peers, Channel channel);
  // `bytes` is a dense tensor of bytes on the CPU. Throws if the other rank's has another size.
  void send(const at::Tensor& bytes, int peer, Channel channel);
  void receive(at::Tensor bytes, int peer, Channel channel);
  // Returns what each rank has given. Throws if they gave other sizes, or call for another `operation`.
  std::vector<at::Tensor> gather(const at::Tensor& bytes, std::int64_t operation);

  // Ends everything that is in flight. The first reason is kept.
  void abort(const std::string& reason);
  // Aborts all wires of the process, for its exit.
  static void abort_all();
  bool is_aborted();
  // Throws c10::DistBackendError with the reason if the wire was aborted.
  void check();

 private:
  using Work = c10::intrusive_ptr<c10d::Work>;
  // An operation of the inner backend with its memory.
  struct Transfer {
    Work work;
    at::Tensor memory;
  };
  Transfer post_send(const at::Tensor& tensor, int peer, int tag);
  Transfer post_receive(const at::Tensor& tensor, int peer, int tag);
  void finish(const Transfer& transfer, std::chrono::milliseconds timeout);
  // Exchanges two numbers with a peer, and throws if its differ.
  void agree(int peer, int tag, const std::array<std::int64_t, 2>& numbers);

  // Outlives its Works.
  const c10::intrusive_ptr<c10d::Backend> inner_;
  const std::chrono::milliseconds connect_timeout_;
  const std::chrono::milliseconds operation_timeout_;
  std::mutex mutex_;
  bool aborted_ = false;
  std::string reason_;
  std::set<c10d::Work*> in_flight_;
  // Aborted transfers. Gloo may still write to their memory.
  std::vector<Transfer> unfinished_;
};

}  // namespace penstock::sim
