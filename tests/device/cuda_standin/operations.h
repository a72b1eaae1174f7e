// Operations of NCCL on a stream. The operations of one group advance together, so that a send and a receive of a group
// do not wait for each other.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "tests/device/cuda_standin/exchange.h"
#include "tests/device/cuda_standin/streams.h"

namespace cuda_standin {

// One operation of one rank. The stream's thread uses it.
class Operation {
 public:
  Operation(Exchange& exchange, int rank) : exchange_(exchange), rank_(rank) {}
  virtual ~Operation() = default;
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  virtual void start() = 0;
  // Does what is possible now. Returns true when the operation has completed.
  virtual bool advance() = 0;
  // Ends an operation that has started and not completed.
  virtual void cancel() = 0;

  Exchange& exchange() const { return exchange_; }
  int rank() const { return rank_; }

 private:
  Exchange& exchange_;
  const int rank_;
};

// Runs operations until all have completed or their ranks have aborted.
void run_together(const std::vector<std::shared_ptr<Operation>>& operations);

class Send : public Operation {
 public:
  Send(Exchange& exchange, const MessageKey& key, const void* data, std::size_t bytes)
      : Operation(exchange, key.from), key_(key), data_(data), bytes_(bytes) {}
  void start() override { exchange().publish(key_, data_, bytes_); }
  bool advance() override;
  void cancel() override { exchange().withdraw(key_); }

 private:
  const MessageKey key_;
  const void* const data_;
  const std::size_t bytes_;
};

class Receive : public Operation {
 public:
  Receive(Exchange& exchange, const MessageKey& key, void* data, std::size_t bytes)
      : Operation(exchange, key.to), key_(key), data_(data), bytes_(bytes) {}
  void start() override {}
  bool advance() override { return exchange().take(key_, data_, bytes_); }
  void cancel() override {}

 private:
  const MessageKey key_;
  void* const data_;
  const std::size_t bytes_;
};

// Describes a collective for one rank.
struct CollectiveArguments {
  int size = 0;
  std::uint64_t number = 0;
  // The data of this rank, and their size.
  const void* input = nullptr;
  std::size_t bytes = 0;
  // The only rank whose data are used, or -1 for the data of all.
  int root = -1;
  // Computes the result from the data of all ranks; those which are not used are empty.
  std::function<void(const std::vector<std::vector<char>>&)> finish;
};

// Sends the data of each rank to every other. The output is written when the input is not used any more, since the two
// may be the same memory.
class Collective : public Operation {
 public:
  Collective(Exchange& exchange, int rank, CollectiveArguments arguments)
      : Operation(exchange, rank), arguments_(std::move(arguments)) {}
  void start() override;
  bool advance() override;
  void cancel() override;

 private:
  bool is_source(int rank) const { return arguments_.root < 0 || arguments_.root == rank; }
  MessageKey key(int from, int to) const {
    return {.from = from, .to = to, .collective = true, .number = arguments_.number};
  }

  const CollectiveArguments arguments_;
  std::vector<std::vector<char>> inputs_;
  std::vector<bool> received_;
};

// Returns the size of an element, or 0 if the stand-in does not support the type.
std::size_t size_of(ncclDataType_t type);
// Returns true if the stand-in supports the type and the reduction.
bool can_reduce(ncclDataType_t type, ncclRedOp_t reduction);
// Stores the reduction of `count` elements of all inputs, beginning with element `first`.
void reduce(const std::vector<std::vector<char>>& inputs, std::size_t first, std::size_t count, ncclDataType_t type,
            ncclRedOp_t reduction, void* output);

}  // namespace cuda_standin
