// Functions of the driver that PyTorch asks libcudart for.
#include <cuda_runtime_api.h>

#include <cstring>

#include "tests/device/cuda_standin/runtime.h"

namespace {

int succeed() {
  return 0;
}

// PyTorch initialises devices that have a context.
int get_context_state(int /*device*/, unsigned* flags, int* active) {
  if (flags != nullptr) *flags = 0;
  *active = 1;
  return 0;
}

}  // namespace

CUDA_STANDIN_EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function,
                                                                 unsigned /*version*/, unsigned long long /*flags*/,
                                                                 cudaDriverEntryPointQueryResult* result) {
  const bool state = std::strcmp(name, "cuDevicePrimaryCtxGetState") == 0;
  *function = state ? reinterpret_cast<void*>(&get_context_state) : reinterpret_cast<void*>(&succeed);
  if (result != nullptr) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
