// NCCL of the stand-in: communicators between threads or processes of one machine, point-to-point messages and
// collectives. Messages are matched in order, have no tags, and a send waits for its receive.
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstring>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "tests/device/cuda_standin/memory.h"
#include "tests/device/cuda_standin/operations.h"
#include "tests/device/cuda_standin/runtime.h"

// One rank's end of a communicator. It stays after ncclCommDestroy(), as streams may use it.
struct ncclComm {
  cuda_standin::Exchange* exchange;
  int rank;
  int size;
  std::uint64_t collectives = 0;
  // Numbers of messages to and from each rank.
  std::map<int, std::uint64_t> sent = {};
  std::map<int, std::uint64_t> received = {};
};

namespace cuda_standin {
namespace {

struct Grouped {
  Stream* stream;
  std::shared_ptr<Operation> operation;
};
thread_local int group_depth = 0;
thread_local std::vector<Grouped> group;

// Enqueues the operations of a group. Those on one stream are one piece of work.
void end_group() {
  std::map<Stream*, std::vector<std::shared_ptr<Operation>>> by_stream;
  for (Grouped& grouped : std::exchange(group, {})) by_stream[grouped.stream].push_back(std::move(grouped.operation));
  for (auto& [stream, operations] : by_stream) {
    stream->enqueue([operations = std::move(operations)] { run_together(operations); });
  }
}

ncclResult_t add(cudaStream_t stream, std::shared_ptr<Operation> operation) {
  group.push_back({.stream = &stream_of(stream), .operation = std::move(operation)});
  if (group_depth == 0) end_group();
  return ncclSuccess;
}

ncclResult_t add_collective(ncclComm_t comm, cudaStream_t stream, const void* input, std::size_t bytes, int root,
                            std::function<void(const std::vector<std::vector<char>>&)> finish) {
  return add(stream, std::make_shared<Collective>(*comm->exchange, comm->rank,
                                                  CollectiveArguments{.size = comm->size,
                                                                      .number = comm->collectives++,
                                                                      .input = accessible(input),
                                                                      .bytes = bytes,
                                                                      .root = root,
                                                                      .finish = std::move(finish)}));
}

}  // namespace
}  // namespace cuda_standin

using cuda_standin::accessible;
using cuda_standin::add;
using cuda_standin::add_collective;
using cuda_standin::can_reduce;
using cuda_standin::Exchange;
using cuda_standin::MessageKey;
using cuda_standin::size_of;
using Inputs = std::vector<std::vector<char>>;

CUDA_STANDIN_EXPORT ncclResult_t ncclGetVersion(int* version) {
  *version = static_cast<int>(cuda_standin::setting("CUDA_STANDIN_NCCL_VERSION", NCCL_VERSION_CODE));
  return ncclSuccess;
}

CUDA_STANDIN_EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  *id = {};
  const std::uint64_t number = Exchange::create();
  std::memcpy(id->internal, &number, sizeof number);
  return ncclSuccess;
}

CUDA_STANDIN_EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank,
                                                        ncclConfig_t* /*config*/) {
  std::uint64_t number = 0;
  std::memcpy(&number, id.internal, sizeof number);
  Exchange* const exchange = size > Exchange::kMaxRanks ? nullptr : Exchange::attach(number);
  if (exchange == nullptr) return ncclInvalidArgument;
  // NCCL reports "Duplicate GPU detected".
  if (!exchange->arrive(rank, size, cuda_standin::current_device())) return ncclInvalidUsage;
  *comm = new ncclComm{.exchange = exchange, .rank = rank, .size = size};
  return ncclSuccess;
}

CUDA_STANDIN_EXPORT ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(comm, size, id, rank, nullptr);
}

CUDA_STANDIN_EXPORT ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int size, int rank, int /*count*/,
                                                          ncclUniqueId* ids, ncclConfig_t* config) {
  return ncclCommInitRankConfig(comm, size, ids[0], rank, config);
}

CUDA_STANDIN_EXPORT ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (comm != nullptr) comm->exchange->abort(comm->rank);
  return ncclSuccess;
}

CUDA_STANDIN_EXPORT ncclResult_t ncclCommDestroy(ncclComm_t /*comm*/) {
  return ncclSuccess;
}

CUDA_STANDIN_EXPORT ncclResult_t ncclCommFinalize(ncclComm_t /*comm*/) {
  return ncclSuccess;
}

CUDA_STANDIN_EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t /*comm*/, ncclResult_t* error) {
  *error = ncclSuccess;
  return ncclSuccess;
}

CUDA_STANDIN_EXPORT ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  *count = comm->size;
  return ncclSuccess;
}

CUDA_STANDIN_EXPORT ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = comm->rank;
  return ncclSuccess;
}

CUDA_STANDIN_EXPORT const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclSuccess ? "no error" : "error of the stand-in";
}

CUDA_STANDIN_EXPORT const char* ncclGetLastError(ncclComm_t /*comm*/) {
  return "";
}

CUDA_STANDIN_EXPORT ncclResult_t ncclCommRegister(const ncclComm_t /*comm*/, void* /*block*/, std::size_t /*bytes*/,
                                                  void** handle) {
  *handle = nullptr;
  return ncclSuccess;
}

CUDA_STANDIN_EXPORT ncclResult_t ncclCommDeregister(const ncclComm_t /*comm*/, void* /*handle*/) {
  return ncclSuccess;
}

CUDA_STANDIN_EXPORT ncclResult_t ncclGroupStart() {
  ++cuda_standin::group_depth;
  return ncclSuccess;
}

CUDA_STANDIN_EXPORT ncclResult_t ncclGroupEnd() {
  if (--cuda_standin::group_depth == 0) cuda_standin::end_group();
  return ncclSuccess;
}

CUDA_STANDIN_EXPORT ncclResult_t ncclSend(const void* from, std::size_t count, ncclDataType_t type, int peer,
                                          ncclComm_t comm, cudaStream_t stream) {
  if (size_of(type) == 0) return ncclInvalidArgument;
  const MessageKey key{.from = comm->rank, .to = peer, .number = comm->sent[peer]++};
  return add(stream,
             std::make_shared<cuda_standin::Send>(*comm->exchange, key, accessible(from), count * size_of(type)));
}

CUDA_STANDIN_EXPORT ncclResult_t ncclRecv(void* to, std::size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                                          cudaStream_t stream) {
  if (size_of(type) == 0) return ncclInvalidArgument;
  const MessageKey key{.from = peer, .to = comm->rank, .number = comm->received[peer]++};
  return add(stream,
             std::make_shared<cuda_standin::Receive>(*comm->exchange, key, accessible(to), count * size_of(type)));
}

CUDA_STANDIN_EXPORT ncclResult_t ncclAllGather(const void* from, void* to, std::size_t count, ncclDataType_t type,
                                               ncclComm_t comm, cudaStream_t stream) {
  const std::size_t bytes = count * size_of(type);
  return add_collective(comm, stream, from, bytes, -1,
                        [to = static_cast<char*>(accessible(to)), bytes](const Inputs& all) {
                          for (std::size_t i = 0; i < all.size(); ++i)
                            std::memcpy(to + i * bytes, all[i].data(), bytes);
                        });
}

CUDA_STANDIN_EXPORT ncclResult_t ncclReduce(const void* from, void* to, std::size_t count, ncclDataType_t type,
                                            ncclRedOp_t reduction, int root, ncclComm_t comm, cudaStream_t stream) {
  if (!can_reduce(type, reduction)) return ncclInvalidArgument;
  const bool stores = root < 0 || root == comm->rank;
  return add_collective(comm, stream, from, count * size_of(type), -1,
                        [to = accessible(to), count, type, reduction, stores](const Inputs& all) {
                          if (stores) cuda_standin::reduce(all, 0, count, type, reduction, to);
                        });
}

CUDA_STANDIN_EXPORT ncclResult_t ncclAllReduce(const void* from, void* to, std::size_t count, ncclDataType_t type,
                                               ncclRedOp_t reduction, ncclComm_t comm, cudaStream_t stream) {
  return ncclReduce(from, to, count, type, reduction, /*root=*/-1, comm, stream);
}

CUDA_STANDIN_EXPORT ncclResult_t ncclReduceScatter(const void* from, void* to, std::size_t count, ncclDataType_t type,
                                                   ncclRedOp_t reduction, ncclComm_t comm, cudaStream_t stream) {
  if (!can_reduce(type, reduction)) return ncclInvalidArgument;
  const auto first = static_cast<std::size_t>(comm->rank) * count;
  const std::size_t bytes = count * size_of(type) * static_cast<std::size_t>(comm->size);
  return add_collective(comm, stream, from, bytes, -1,
                        [to = accessible(to), first, count, type, reduction](const Inputs& all) {
                          cuda_standin::reduce(all, first, count, type, reduction, to);
                        });
}

CUDA_STANDIN_EXPORT ncclResult_t ncclBroadcast(const void* from, void* to, std::size_t count, ncclDataType_t type,
                                               int root, ncclComm_t comm, cudaStream_t stream) {
  const std::size_t bytes = count * size_of(type);
  return add_collective(comm, stream, from, bytes, root, [to = accessible(to), root, bytes](const Inputs& all) {
    std::memcpy(to, all[static_cast<std::size_t>(root)].data(), bytes);
  });
}

CUDA_STANDIN_EXPORT ncclResult_t ncclBcast(void* block, std::size_t count, ncclDataType_t type, int root,
                                           ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcast(block, block, count, type, root, comm, stream);
}
