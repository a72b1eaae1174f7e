// Copies of the stand-in. As with CUDA, the host waits for a copy only if pageable memory takes part in it.
#include <cuda_runtime_api.h>

#include <cstring>
#include <memory>
#include <vector>

#include "tests/device/cuda_standin/memory.h"
#include "tests/device/cuda_standin/runtime.h"
#include "tests/device/cuda_standin/streams.h"

using cuda_standin::accessible;
using cuda_standin::is_allocated_by_cuda;
using cuda_standin::stream_of;

CUDA_STANDIN_EXPORT cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind /*kind*/,
                                                cudaStream_t handle) {
  cuda_standin::Stream& stream = stream_of(handle);
  void* const target = accessible(to);
  if (is_allocated_by_cuda(from)) {
    stream.enqueue([target, source = accessible(from), bytes] { std::memcpy(target, source, bytes); });
  } else {
    // Pageable memory is read before the call returns.
    const char* const first = static_cast<const char*>(from);
    const auto staged = std::make_shared<std::vector<char>>(first, first + bytes);
    stream.enqueue([target, staged] { std::memcpy(target, staged->data(), staged->size()); });
  }
  if (!is_allocated_by_cuda(to)) stream.mark()->wait();
  return cudaSuccess;
}

CUDA_STANDIN_EXPORT cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  return cudaStreamSynchronize(nullptr);
}

CUDA_STANDIN_EXPORT cudaError_t cudaMemcpyPeerAsync(void* to, int /*to_device*/, const void* from, int /*from_device*/,
                                                    std::size_t bytes, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}

CUDA_STANDIN_EXPORT cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  stream_of(stream).enqueue([target = accessible(to), value, bytes] { std::memset(target, value, bytes); });
  return cudaSuccess;
}

CUDA_STANDIN_EXPORT cudaError_t cudaMemset(void* to, int value, std::size_t bytes) {
  return cudaMemsetAsync(to, value, bytes, nullptr);
}
