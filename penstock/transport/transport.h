// Point-to-point messages and collectives between ranks. A Transport is one rank's endpoint. Every wait has a deadline,
// and a rank that fails ends the waits of all ranks.
//
//   transport.post_receive(/*from=*/0, tag);                 // rank 1
//   transport.send(/*to=*/1, tag, {activation}, deadline);   // rank 0
//   Message message = transport.receive(0, tag, deadline);   // rank 1
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "penstock/base/deadline.h"
#include "penstock/transport/message_order.h"

namespace penstock {

// The tensors of one message. An undefined tensor stands for None.
using Message = std::vector<at::Tensor>;

// Thrown when a wait for another rank ends without its result.
class TransportError : public std::runtime_error {
 public:
  enum class Why {
    // The deadline passed.
    Timeout,
    // The connection to the peer is lost.
    PeerLost,
    // A rank has failed and aborted the transport.
    Aborted,
  };
  static constexpr int kNoPeer = -1;

  TransportError(Why why, int peer, const std::string& what) : std::runtime_error(what), why_(why), peer_(peer) {}

  Why why() const { return why_; }
  // Returns the rank that was waited for, or kNoPeer.
  int peer() const { return peer_; }

 private:
  Why why_;
  int peer_;
};

// Thrown when a tensor of a message cannot be sent, because it has no elements in memory that could be read.
class UnsendableTensor : public std::invalid_argument {
 public:
  UnsendableTensor(std::size_t index, const std::string& why)
      : std::invalid_argument("tensor " + std::to_string(index) + " of the message is " + why),
        index_(index),
        why_(why) {}

  // Returns the tensor's index in the message.
  std::size_t index() const { return index_; }
  // Returns a description such as "a sparse float32 tensor of shape [2]; …".
  const std::string& why() const { return why_; }

 private:
  std::size_t index_;
  std::string why_;
};

// A message for which a device of a rank waits, although the rank's host may have gone on.
struct AwaitedMessage {
  // Rank that sends it, or that has to receive it.
  int peer = TransportError::kNoPeer;
  Tag tag;
  bool is_receive = true;
  // Time at which the device came to it.
  Clock::time_point since;
};

// A collective in flight. Its tensors must not be accessed before wait() has returned.
class Work {
 public:
  virtual ~Work() = default;
  // Blocks until the collective has completed on this rank. Throws TransportError.
  virtual void wait(Deadline deadline) = 0;
};

// A process group: ranks that take part in collectives together. All members call the same collectives in the same
// order, with tensors of equal sizes and dtypes; each call returns at once. One thread uses a member at a time.
//
// Thread ranks sum in the order of members, so that results are reproducible. Process ranks do so for small tensors,
// and let the backend choose the order otherwise.
class Group {
 public:
  virtual ~Group() = default;
  // Returns the number of members.
  virtual int size() const = 0;
  // Returns this rank's index among the members.
  virtual int member() const = 0;

  // Replaces every tensor by its sum over all members.
  virtual std::unique_ptr<Work> all_reduce(std::vector<at::Tensor> tensors) = 0;
  // Concatenates the parts of all members into `whole`. Each part has 1/size of its elements.
  virtual std::unique_ptr<Work> all_gather(at::Tensor whole, at::Tensor part) = 0;
  // Sums the members' `whole` tensors and stores this member's part of the sum in `part`.
  virtual std::unique_ptr<Work> reduce_scatter(at::Tensor part, at::Tensor whole) = 0;
  // Replaces every tensor by that of member `root`.
  virtual std::unique_ptr<Work> broadcast(std::vector<at::Tensor> tensors, int root) = 0;
  // Completes when all members have called it.
  virtual std::unique_ptr<Work> barrier() = 0;
};

// One rank's endpoint. The rank's thread uses it; abort(), waiting_for(), awaited_by_device() and reports() may be called
// from any thread.
class Transport {
 public:
  static constexpr int kNoPeer = TransportError::kNoPeer;

  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int ranks() const = 0;

  // Returns true if the transport sends messages between devices without copying them to CPU memory. It needs to know
  // their order: see set_order(). The result is the same on all ranks.
  virtual bool needs_order() const { return false; }
  // Sets the messages of the following steps, which all ranks do at the same time. Connects ranks that exchange messages
  // directly for the first time, which blocks until both do. Messages that are not in the order are copied to CPU memory.
  // Call it between steps. Throws std::invalid_argument if a message is in the order twice, and TransportError.
  virtual void set_order(const std::shared_ptr<const MessageOrder>& /*order*/) {}

  // Begins a step. Either all ranks call it for a step, or none. All receives that were posted have completed.
  //
  // Process ranks send shapes only in the first step and after a change: later messages are expected to have the shapes
  // of the previous step. They send shapes again when the signature of any rank differs from that of its previous step.
  // The signature hashes what this rank knows of the step's sizes: shapes of its inputs, number of microbatches, and
  // whether there are backwards.
  virtual void begin_step(std::uint64_t signature) = 0;
  // Ends a step: blocks until all messages that were sent have been received. Messages that are sent from device to
  // device may outlive the step: their receivers have until the deadline, counted from the time at which this rank's
  // devices have ended the step, and a later call throws the error. In their place, it blocks until all ranks end the
  // step, unless there is no order. Throws TransportError.
  virtual void end_step(Deadline deadline) = 0;

  // Announces that a message will be received, and the device on which its tensors are wanted. All messages of a channel
  // are wanted on the same device. Does not block.
  virtual void post_receive(int from, Tag tag, at::Device device) = 0;
  void post_receive(int from, Tag tag) { post_receive(from, tag, at::kCPU); }
  // Sends a message, including each tensor's requires_grad. May block until the receive is posted. The tensors belong
  // to the receiver afterwards, and the sender must not access them. On a device, the message has the values that the
  // calling thread's current streams compute, for which the host does not wait. Throws TransportError; process ranks
  // throw UnsendableTensor before anything is sent.
  virtual void send(int to, Tag tag, Message message, Deadline deadline) = 0;
  // Blocks until the message has arrived, and returns it. On a device, later work of the calling thread's current
  // streams comes after its arrival, for which the host does not wait: if it does not arrive, the stream continues with
  // undefined values, and later calls throw. Throws TransportError.
  virtual Message receive(int from, Tag tag, Deadline deadline) = 0;

  // Returns the rank that a call waits for now, or that the last one failed to wait for; kNoPeer otherwise.
  virtual int waiting_for() const = 0;
  // Returns the message that this rank's devices have waited for longest. After an abort, it is the one that they waited
  // for then.
  virtual std::optional<AwaitedMessage> awaited_by_device() const { return std::nullopt; }

  // Creates a group of these ranks, with this rank among them; the list gives the order of members. All members call
  // it, and groups that share a rank are created in the same order on all of them. `devices` are those of the tensors
  // that this rank will use in collectives, the CPU included: if there is one on each member and it is an accelerator,
  // its tensors may be reduced there.
  virtual std::shared_ptr<Group> group(const std::vector<int>& ranks, const std::vector<at::Device>& devices) = 0;
  std::shared_ptr<Group> group(const std::vector<int>& ranks) { return group(ranks, {}); }

  // Ends all current and future waits on all ranks with TransportError and this reason. Only the first call has an
  // effect.
  virtual void abort(const std::string& why) noexcept = 0;
  // Sets the function that describes this rank's state when the transport is aborted or a peer is lost; nullptr removes
  // it. It is called by whichever thread detects the failure, possibly while the rank computes. Call this while no step
  // runs.
  virtual void on_abort(std::function<std::string()> report) = 0;
  // Time that a rank which has failed gives the others to send their reports.
  static constexpr Clock::duration kReportTime = std::chrono::milliseconds(500);
  // Returns the reports of all ranks after an abort, by rank. A report is nullopt if it has not arrived by the
  // deadline, and empty if the rank had none.
  virtual std::vector<std::optional<std::string>> reports(Deadline deadline) = 0;
};

}  // namespace penstock
