// State that all functions of the stand-in share: the current device and the last error of each thread.
#pragma once

#include <cuda_runtime_api.h>

// Marks a function that replaces one of libcudart or libnccl. The library is preloaded, so these are found first.
#define CUDA_STANDIN_EXPORT extern "C" __attribute__((visibility("default")))

namespace cuda_standin {

int current_device();
// Stores an error for cudaGetLastError(), and returns it.
cudaError_t remember(cudaError_t error);
// Returns the number in an environment variable, or `otherwise`.
unsigned long setting(const char* variable, unsigned long otherwise);
// Ends the process with a message. Called where CUDA or NCCL has undefined behaviour.
[[noreturn]] void fail(const char* what);

}  // namespace cuda_standin
