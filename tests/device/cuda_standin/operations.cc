#include "tests/device/cuda_standin/operations.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace cuda_standin {
namespace {

template <class Element>
Element combine(Element a, Element b, ncclRedOp_t reduction) {
  switch (reduction) {
    case ncclProd: return static_cast<Element>(a * b);
    case ncclMax: return std::max(a, b);
    case ncclMin: return std::min(a, b);
    default: return static_cast<Element>(a + b);
  }
}

template <class Element>
void reduce_as(const std::vector<std::vector<char>>& inputs, std::size_t first, std::size_t count,
               ncclRedOp_t reduction, void* output) {
  const auto element = [first](const std::vector<char>& input, std::size_t i) {
    Element value;
    std::memcpy(&value, input.data() + (first + i) * sizeof(Element), sizeof(Element));
    return value;
  };
  for (std::size_t i = 0; i < count; ++i) {
    Element value = element(inputs.front(), i);
    for (std::size_t rank = 1; rank < inputs.size(); ++rank)
      value = combine(value, element(inputs[rank], i), reduction);
    if (reduction == ncclAvg) value = static_cast<Element>(value / static_cast<Element>(inputs.size()));
    std::memcpy(static_cast<char*>(output) + i * sizeof(Element), &value, sizeof(Element));
  }
}

}  // namespace

void run_together(const std::vector<std::shared_ptr<Operation>>& operations) {
  std::vector<Operation*> waiting;
  for (const auto& operation : operations) {
    operation->start();
    waiting.push_back(operation.get());
  }
  while (!waiting.empty()) {
    // All operations of a group and stream belong to one communicator, or are checked again after a few milliseconds.
    Exchange& exchange = waiting.front()->exchange();
    const std::uint32_t seen = exchange.version();
    const bool advanced = std::erase_if(waiting, [](Operation* operation) {
                            if (operation->exchange().is_aborted(operation->rank())) {
                              operation->cancel();
                              return true;
                            }
                            return operation->advance();
                          }) > 0;
    if (!advanced) exchange.wait_for_change(seen);
  }
}

bool Send::advance() {
  if (!exchange().is_taken(key_)) return false;
  exchange().withdraw(key_);
  return true;
}

void Collective::start() {
  inputs_.resize(static_cast<std::size_t>(arguments_.size));
  received_.resize(inputs_.size());
  for (int to = 0; to < arguments_.size && is_source(rank()); ++to) {
    exchange().publish(key(rank(), to), arguments_.input, arguments_.bytes);
  }
}

bool Collective::advance() {
  bool complete = true;
  for (int from = 0; from < arguments_.size; ++from) {
    const auto index = static_cast<std::size_t>(from);
    if (!is_source(from) || received_[index]) continue;
    inputs_[index].resize(arguments_.bytes);
    received_[index] = exchange().take(key(from, rank()), inputs_[index].data(), arguments_.bytes);
    complete = complete && received_[index];
  }
  for (int to = 0; to < arguments_.size && is_source(rank()); ++to) {
    complete = complete && exchange().is_taken(key(rank(), to));
  }
  if (!complete) return false;
  cancel();
  arguments_.finish(inputs_);
  return true;
}

void Collective::cancel() {
  for (int to = 0; to < arguments_.size && is_source(rank()); ++to) exchange().withdraw(key(rank(), to));
}

std::size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8: return 1;
    case ncclFloat16:
    case ncclBfloat16: return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32: return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64: return 8;
    default: return 0;
  }
}

bool can_reduce(ncclDataType_t type, ncclRedOp_t reduction) {
  return size_of(type) != 0 && type != ncclFloat16 && type != ncclBfloat16 && reduction >= ncclSum &&
         reduction <= ncclAvg;
}

void reduce(const std::vector<std::vector<char>>& inputs, std::size_t first, std::size_t count, ncclDataType_t type,
            ncclRedOp_t reduction, void* output) {
  switch (type) {
    case ncclInt8: return reduce_as<std::int8_t>(inputs, first, count, reduction, output);
    case ncclUint8: return reduce_as<std::uint8_t>(inputs, first, count, reduction, output);
    case ncclInt32: return reduce_as<std::int32_t>(inputs, first, count, reduction, output);
    case ncclUint32: return reduce_as<std::uint32_t>(inputs, first, count, reduction, output);
    case ncclInt64: return reduce_as<std::int64_t>(inputs, first, count, reduction, output);
    case ncclUint64: return reduce_as<std::uint64_t>(inputs, first, count, reduction, output);
    case ncclFloat32: return reduce_as<float>(inputs, first, count, reduction, output);
    case ncclFloat64: return reduce_as<double>(inputs, first, count, reduction, output);
    default: return;
  }
}

}  // namespace cuda_standin
