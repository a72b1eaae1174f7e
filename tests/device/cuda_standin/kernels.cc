// Kernels: the stand-in accepts their registration, and every launch fails with cudaErrorNotSupported.
#include <cuda_runtime_api.h>

#include <cstddef>

#include "tests/device/cuda_standin/runtime.h"

using cuda_standin::remember;

CUDA_STANDIN_EXPORT void** __cudaRegisterFatBinary(void* /*binary*/) {
  static void* handle = nullptr;
  return &handle;
}

CUDA_STANDIN_EXPORT void __cudaRegisterFatBinaryEnd(void** /*handle*/) {}
CUDA_STANDIN_EXPORT void __cudaUnregisterFatBinary(void** /*handle*/) {}
CUDA_STANDIN_EXPORT void __cudaRegisterFunction(void** /*handle*/, const char* /*host*/, char* /*device*/,
                                                const char* /*name*/, int /*limit*/, uint3* /*thread*/,
                                                uint3* /*block*/, dim3* /*block_size*/, dim3* /*grid_size*/,
                                                int* /*warp_size*/) {}
CUDA_STANDIN_EXPORT void __cudaRegisterVar(void** /*handle*/, char* /*host*/, char* /*device*/, const char* /*name*/,
                                           int /*external*/, std::size_t /*size*/, int /*constant*/, int /*global*/) {}

CUDA_STANDIN_EXPORT unsigned __cudaPushCallConfiguration(dim3 /*grid*/, dim3 /*block*/, std::size_t /*shared*/,
                                                         void* /*stream*/) {
  return 0;
}

CUDA_STANDIN_EXPORT cudaError_t __cudaPopCallConfiguration(dim3* /*grid*/, dim3* /*block*/, std::size_t* /*shared*/,
                                                           void* /*stream*/) {
  return cudaSuccess;
}

CUDA_STANDIN_EXPORT cudaError_t __cudaGetKernel(void** kernel, const void* function) {
  *kernel = const_cast<void*>(function);
  return cudaSuccess;
}

CUDA_STANDIN_EXPORT cudaError_t __cudaLaunchKernel(void* /*kernel*/, dim3 /*grid*/, dim3 /*block*/,
                                                   void** /*arguments*/, std::size_t /*shared*/,
                                                   cudaStream_t /*stream*/) {
  return remember(cudaErrorNotSupported);
}

CUDA_STANDIN_EXPORT cudaError_t cudaLaunchKernel(const void* /*function*/, dim3 /*grid*/, dim3 /*block*/,
                                                 void** /*arguments*/, std::size_t /*shared*/,
                                                 cudaStream_t /*stream*/) {
  return remember(cudaErrorNotSupported);
}

CUDA_STANDIN_EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* /*config*/, const void* /*function*/,
                                                    void** /*arguments*/) {
  return remember(cudaErrorNotSupported);
}

CUDA_STANDIN_EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* /*function*/) {
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}
