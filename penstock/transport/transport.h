// Moving tensors between ranks, and the collectives of groups of them. A Transport is one rank's end of it; every wait
// has a deadline, and whoever fails ends the waiting of all.
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

namespace penstock {

// What a message is called between two ranks: the channel that it goes through, and its number there.
struct Tag {
  std::uint32_t channel = 0;
  std::uint32_t number = 0;
  friend bool operator==(const Tag&, const Tag&) = default;
};

// Tensors that travel together; an undefined one stands for None.
using Message = std::vector<at::Tensor>;

class TransportError : public std::runtime_error {
 public:
  enum class Why {
    // Nothing came within the deadline.
    Late,
    // The connection to the other rank is lost.
    Gone,
    // Another rank has failed, and said so.
    Aborted,
  };
  static constexpr int kNobody = -1;

  TransportError(Why why, int peer, const std::string& what) : std::runtime_error(what), why_(why), peer_(peer) {}

  Why why() const { return why_; }
  // The rank that was waited for, or kNobody.
  int peer() const { return peer_; }

 private:
  Why why_;
  int peer_;
};

// A tensor of a message cannot be sent: there are no elements in the CPU's memory that could be read.
class UnsendableTensor : public std::invalid_argument {
 public:
  UnsendableTensor(std::size_t index, const std::string& why)
      : std::invalid_argument("tensor " + std::to_string(index) + " of the message is " + why),
        index_(index),
        why_(why) {}

  // The tensor's place in the message.
  std::size_t index() const { return index_; }
  // "a sparse float32 tensor of shape [2]; …"
  const std::string& why() const { return why_; }

 private:
  std::size_t index_;
  std::string why_;
};

// A collective that has begun. Its tensors are not to be touched before wait returns.
class Work {
 public:
  virtual ~Work() = default;
  // Throws TransportError.
  virtual void wait(Deadline deadline) = 0;
};

// Some ranks that act together. All of them call the same in the same order, with tensors of the same sizes and types.
// Sums are made in the order of members between threads, and wherever there is no faster order between processes.
class Group {
 public:
  virtual ~Group() = default;
  // How many they are, and which one this is.
  virtual int size() const = 0;
  virtual int member() const = 0;

  // Every tensor becomes the sum over all members.
  virtual std::unique_ptr<Work> all_reduce(std::vector<at::Tensor> tensors) = 0;
  // `whole` becomes the parts of all members, one behind the other; each part has 1/size of its elements.
  virtual std::unique_ptr<Work> all_gather(at::Tensor whole, at::Tensor part) = 0;
  // `part` becomes this member's part of the sum of all wholes.
  virtual std::unique_ptr<Work> reduce_scatter(at::Tensor part, at::Tensor whole) = 0;
  // Every tensor becomes that of member `root`.
  virtual std::unique_ptr<Work> broadcast(std::vector<at::Tensor> tensors, int root) = 0;
  virtual std::unique_ptr<Work> barrier() = 0;
};

class Transport {
 public:
  static constexpr int kNobody = TransportError::kNobody;

  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int ranks() const = 0;

  // Opens a step; all ranks call it, or none. Between processes a message travels without a word on its shapes when they
  // are those of the step before. They are looked at again in the first step, and whenever the signature of some rank is
  // another than it was in its last step: the sizes that it brings into the step, the number of microbatches and whether
  // there are backwards belong to it, as far as the rank knows of them. All that was posted has been received by then.
  virtual void begin_step(std::uint64_t signature) = 0;
  // Closes a step: waits until all that was sent has been taken. Throws TransportError.
  virtual void end_step(Deadline deadline) = 0;

  // Says that a message will be taken.
  virtual void post_receive(int from, Tag tag) = 0;
  // May wait until the receive is posted. What was sent is the receiver's: the sender does not touch it again. Whether a
  // tensor requires grad is told too. Throws TransportError, and between processes UnsendableTensor before anything is
  // sent.
  virtual void send(int to, Tag tag, Message message, Deadline deadline) = 0;
  // The message, once it has come. Throws TransportError.
  virtual Message receive(int from, Tag tag, Deadline deadline) = 0;

  // The rank that a call waits for now, or that the last one failed to wait for; kNobody for none. Any thread may ask.
  virtual int waiting_for() const = 0;

  // A group of ranks, this one among them, in the order of its list. All of its members ask for it, and groups that
  // have a rank in common are asked for in the same order.
  virtual std::shared_ptr<Group> group(const std::vector<int>& ranks) = 0;

  // Ends all waiting on all ranks, now and later. The first call counts.
  virtual void abort(const std::string& why) noexcept = 0;
  // What this rank says of itself when waiting ends so, or because a rank is gone: asked by whichever thread learns of it,
  // also while the rank is busy. To be set while no step runs; nullptr for nothing.
  virtual void on_abort(std::function<std::string()> report) = 0;
  // How long a rank that has failed gives the others to say where they were.
  static constexpr Clock::duration kReportTime = std::chrono::milliseconds(500);
  // What each rank has said of itself, after all waiting has ended: by rank, as far as it has come by the deadline; empty
  // for one that had nothing to say.
  virtual std::vector<std::optional<std::string>> reports(Deadline deadline) = 0;
};

}  // namespace penstock
