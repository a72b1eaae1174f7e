// Devices, their properties, and errors.
#include "tests/device/cuda_standin/runtime.h"

#include <cstdio>
#include <cstdlib>
#include <utility>

#include "tests/device/cuda_standin/memory.h"
#include "tests/device/cuda_standin/streams.h"

namespace cuda_standin {
namespace {

thread_local int device_of_thread = 0;
thread_local cudaError_t error_of_thread = cudaSuccess;

}  // namespace

int current_device() {
  return device_of_thread;
}

cudaError_t remember(cudaError_t error) {
  if (error != cudaSuccess) error_of_thread = error;
  return error;
}

unsigned long setting(const char* variable, unsigned long otherwise) {
  const char* const text = std::getenv(variable);
  return text == nullptr ? otherwise : std::strtoul(text, nullptr, 10);
}

void fail(const char* what) {
  std::fprintf(stderr, "cuda_standin: %s\n", what);
  std::abort();
}

}  // namespace cuda_standin

using cuda_standin::device_of_thread;
using cuda_standin::error_of_thread;
using cuda_standin::kDevices;
using cuda_standin::remember;

CUDA_STANDIN_EXPORT cudaError_t cudaGetDeviceCount(int* count) {
  *count = static_cast<int>(cuda_standin::setting("CUDA_STANDIN_DEVICES", kDevices));
  return remember(*count == 0 ? cudaErrorNoDevice : cudaSuccess);
}

CUDA_STANDIN_EXPORT cudaError_t cudaGetDevice(int* device) {
  *device = device_of_thread;
  return cudaSuccess;
}

CUDA_STANDIN_EXPORT cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= kDevices) return remember(cudaErrorInvalidDevice);
  device_of_thread = device;
  return cudaSuccess;
}

CUDA_STANDIN_EXPORT cudaError_t cudaDeviceSynchronize() {
  cuda_standin::synchronize_device(device_of_thread);
  return cudaSuccess;
}

CUDA_STANDIN_EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int /*device*/) {
  *properties = {};
  std::snprintf(properties->name, sizeof properties->name, "stand-in");
  properties->major = 9;
  properties->totalGlobalMem = cuda_standin::kMemoryBytes;
  properties->multiProcessorCount = 16;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = 0x7fffffff;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->warpSize = 32;
  properties->sharedMemPerBlock = 49152;
  properties->regsPerBlock = 65536;
  return cudaSuccess;
}

CUDA_STANDIN_EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr /*attribute*/, int /*device*/) {
  *value = 0;
  return cudaSuccess;
}

// Copies between devices are copies of a stream, as on machines without peer access.
CUDA_STANDIN_EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int /*device*/, int /*peer*/) {
  *can = 0;
  return cudaSuccess;
}

CUDA_STANDIN_EXPORT cudaError_t cudaDeviceEnablePeerAccess(int /*peer*/, unsigned /*flags*/) {
  return cudaSuccess;
}

CUDA_STANDIN_EXPORT cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  std::snprintf(text, static_cast<std::size_t>(length), "0000:%02x:00.0", static_cast<unsigned>(device));
  return cudaSuccess;
}

CUDA_STANDIN_EXPORT cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

CUDA_STANDIN_EXPORT cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

CUDA_STANDIN_EXPORT cudaError_t cudaGetLastError() {
  return std::exchange(error_of_thread, cudaSuccess);
}

CUDA_STANDIN_EXPORT cudaError_t cudaPeekAtLastError() {
  return error_of_thread;
}

CUDA_STANDIN_EXPORT const char* cudaGetErrorString(cudaError_t error) {
  if (error == cudaSuccess) return "no error";
  if (error == cudaErrorNotSupported) return "the stand-in runs no kernels";
  if (error == cudaErrorNoDevice) return "no CUDA-capable device is detected";
  if (error == cudaErrorMemoryAllocation) return "out of memory";
  return "error of the stand-in";
}

CUDA_STANDIN_EXPORT const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaSuccess ? "cudaSuccess" : "cudaError";
}
