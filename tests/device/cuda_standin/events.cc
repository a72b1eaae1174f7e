// Events of the stand-in: the marker that was recorded last.
#include <cuda_runtime_api.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <utility>

#include "tests/device/cuda_standin/runtime.h"
#include "tests/device/cuda_standin/streams.h"

namespace cuda_standin {
namespace {

class Event {
 public:
  void record(Stream& stream) {
    auto marker = stream.mark();
    const std::lock_guard lock(mutex_);
    marker_ = std::move(marker);
  }
  // Returns nullptr before the first record().
  std::shared_ptr<Marker> marker() {
    const std::lock_guard lock(mutex_);
    return marker_;
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<Marker> marker_;
};

Event& event_of(cudaEvent_t handle) {
  return *reinterpret_cast<Event*>(handle);
}

}  // namespace
}  // namespace cuda_standin

using cuda_standin::event_of;
using cuda_standin::stream_of;

CUDA_STANDIN_EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned /*flags*/) {
  *handle = reinterpret_cast<cudaEvent_t>(new cuda_standin::Event);
  return cudaSuccess;
}

CUDA_STANDIN_EXPORT cudaError_t cudaEventCreate(cudaEvent_t* handle) {
  return cudaEventCreateWithFlags(handle, 0);
}

CUDA_STANDIN_EXPORT cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  delete &event_of(handle);
  return cudaSuccess;
}

CUDA_STANDIN_EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned /*flags*/) {
  event_of(handle).record(stream_of(stream));
  return cudaSuccess;
}

CUDA_STANDIN_EXPORT cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
  return cudaEventRecordWithFlags(handle, stream, 0);
}

CUDA_STANDIN_EXPORT cudaError_t cudaEventQuery(cudaEvent_t handle) {
  const auto marker = event_of(handle).marker();
  return marker == nullptr || marker->is_reached() ? cudaSuccess : cudaErrorNotReady;
}

CUDA_STANDIN_EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  if (const auto marker = event_of(handle).marker()) marker->wait();
  return cudaSuccess;
}

CUDA_STANDIN_EXPORT cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  const auto first = event_of(start).marker();
  const auto last = event_of(end).marker();
  if (first == nullptr || last == nullptr) return cuda_standin::remember(cudaErrorInvalidResourceHandle);
  if (!first->is_reached() || !last->is_reached()) return cudaErrorNotReady;
  *milliseconds = std::chrono::duration<float, std::milli>(last->time() - first->time()).count();
  return cudaSuccess;
}

CUDA_STANDIN_EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t handle, unsigned /*flags*/) {
  if (auto marker = event_of(handle).marker()) stream_of(stream).enqueue([marker] { marker->wait(); });
  return cudaSuccess;
}
