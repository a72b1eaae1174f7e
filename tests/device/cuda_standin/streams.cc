#include "tests/device/cuda_standin/streams.h"

#include <array>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

#include "tests/device/cuda_standin/memory.h"
#include "tests/device/cuda_standin/runtime.h"

namespace cuda_standin {
namespace {

// All streams, in the order of their creation. Never destroyed.
struct Streams {
  std::mutex mutex;
  std::vector<Stream*> all;
};
Streams& streams() {
  static auto* const kStreams = new Streams;
  return *kStreams;
}

// Longest delay before an operation, in microseconds.
unsigned long longest_delay() {
  static const unsigned long kDelay = setting("CUDA_STANDIN_DELAY_US", 200);
  return kDelay;
}

}  // namespace

void Marker::reach() {
  const std::lock_guard lock(mutex_);
  reached_ = true;
  time_ = std::chrono::steady_clock::now();
  changed_.notify_all();
}

void Marker::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return reached_; });
}

bool Marker::is_reached() {
  const std::lock_guard lock(mutex_);
  return reached_;
}

std::chrono::steady_clock::time_point Marker::time() {
  const std::lock_guard lock(mutex_);
  return time_;
}

void Stream::enqueue(std::function<void()> operation) {
  const std::lock_guard lock(mutex_);
  operations_.push_back(std::move(operation));
  // PyTorch creates many streams that it never uses.
  if (!std::exchange(started_, true)) std::thread([this] { run(); }).detach();
  changed_.notify_all();
}

std::shared_ptr<Marker> Stream::mark() {
  auto marker = std::make_shared<Marker>();
  enqueue([marker] { marker->reach(); });
  return marker;
}

bool Stream::is_idle() {
  const std::lock_guard lock(mutex_);
  return operations_.empty() && !busy_;
}

void Stream::run() {
  for (;;) {
    std::function<void()> operation;
    {
      std::unique_lock lock(mutex_);
      busy_ = false;
      changed_.wait(lock, [this] { return !operations_.empty(); });
      operation = std::move(operations_.front());
      operations_.pop_front();
      busy_ = true;
    }
    if (longest_delay() > 0) {
      std::uniform_int_distribution<unsigned long> delay(0, longest_delay());
      std::this_thread::sleep_for(std::chrono::microseconds(delay(random_)));
    }
    operation();
  }
}

Stream* create_stream(int device) {
  static const unsigned long kSeed = setting("CUDA_STANDIN_SEED", 1);
  Streams& known = streams();
  const std::lock_guard lock(known.mutex);
  known.all.push_back(new Stream(device, kSeed + known.all.size()));
  return known.all.back();
}

Stream& stream_of(cudaStream_t handle) {
  static const auto kDefaults = [] {
    std::array<Stream*, kDevices> defaults{};
    for (int device = 0; device < kDevices; ++device)
      defaults[static_cast<std::size_t>(device)] = create_stream(device);
    return defaults;
  }();
  // Null, cudaStreamLegacy and cudaStreamPerThread are not addresses.
  if (reinterpret_cast<std::uintptr_t>(handle) <= 2) return *kDefaults[static_cast<std::size_t>(current_device())];
  return *reinterpret_cast<Stream*>(handle);
}

void synchronize_device(int device) {
  std::vector<std::shared_ptr<Marker>> markers;
  {
    Streams& known = streams();
    const std::lock_guard lock(known.mutex);
    for (Stream* stream : known.all) {
      if (stream->device() == device && !stream->is_idle()) markers.push_back(stream->mark());
    }
  }
  for (const auto& marker : markers) marker->wait();
}

}  // namespace cuda_standin

using cuda_standin::stream_of;

CUDA_STANDIN_EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned /*flags*/,
                                                             int /*priority*/) {
  *handle = reinterpret_cast<cudaStream_t>(cuda_standin::create_stream(cuda_standin::current_device()));
  return cudaSuccess;
}

CUDA_STANDIN_EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
  return cudaStreamCreateWithPriority(handle, flags, 0);
}

// Operations in flight still run, and the stream's thread stays.
CUDA_STANDIN_EXPORT cudaError_t cudaStreamDestroy(cudaStream_t /*handle*/) {
  return cudaSuccess;
}

CUDA_STANDIN_EXPORT cudaError_t cudaStreamQuery(cudaStream_t handle) {
  return stream_of(handle).is_idle() ? cudaSuccess : cudaErrorNotReady;
}

CUDA_STANDIN_EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  stream_of(handle).mark()->wait();
  return cudaSuccess;
}

CUDA_STANDIN_EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -3;
  return cudaSuccess;
}

// Graphs are never captured.
CUDA_STANDIN_EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t /*handle*/, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

CUDA_STANDIN_EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t /*handle*/, cudaStreamCaptureStatus* status,
                                                         unsigned long long* id, cudaGraph_t* graph,
                                                         const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                                         std::size_t* count) {
  *status = cudaStreamCaptureStatusNone;
  if (id != nullptr) *id = 0;
  if (graph != nullptr) *graph = nullptr;
  if (nodes != nullptr) *nodes = nullptr;
  if (edges != nullptr) *edges = nullptr;
  if (count != nullptr) *count = 0;
  return cudaSuccess;
}

CUDA_STANDIN_EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  *mode = cudaStreamCaptureModeGlobal;
  return cudaSuccess;
}
