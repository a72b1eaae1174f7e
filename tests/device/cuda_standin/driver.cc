// libcuda.so.1 of the stand-in. PyTorch calls few functions of the driver, and needs the result of one of them.

// Defines a function that returns CUDA_SUCCESS and stores nothing.
#define CUDA_STANDIN_STUB(name)                                  \
  extern "C" __attribute__((visibility("default"))) int name() { \
    return 0;                                                    \
  }

CUDA_STANDIN_STUB(cuCtxGetCurrent)
CUDA_STANDIN_STUB(cuCtxSetCurrent)
CUDA_STANDIN_STUB(cuDeviceGet)
CUDA_STANDIN_STUB(cuDeviceGetAttribute)
CUDA_STANDIN_STUB(cuDevicePrimaryCtxRetain)
CUDA_STANDIN_STUB(cuFuncGetAttribute)
CUDA_STANDIN_STUB(cuFuncSetAttribute)
CUDA_STANDIN_STUB(cuFuncSetCacheConfig)
CUDA_STANDIN_STUB(cuGetErrorString)
CUDA_STANDIN_STUB(cuLaunchCooperativeKernel)
CUDA_STANDIN_STUB(cuLaunchKernel)
CUDA_STANDIN_STUB(cuLinkAddData_v2)
CUDA_STANDIN_STUB(cuLinkComplete)
CUDA_STANDIN_STUB(cuLinkCreate_v2)
CUDA_STANDIN_STUB(cuModuleGetFunction)
CUDA_STANDIN_STUB(cuModuleLoad)
CUDA_STANDIN_STUB(cuModuleLoadData)
CUDA_STANDIN_STUB(cuModuleLoadDataEx)
CUDA_STANDIN_STUB(cuModuleUnload)
CUDA_STANDIN_STUB(cuOccupancyMaxActiveBlocksPerMultiprocessor)
CUDA_STANDIN_STUB(cuPointerGetAttribute)
CUDA_STANDIN_STUB(cuTensorMapEncodeTiled)

extern "C" __attribute__((visibility("default"))) int cuDevicePrimaryCtxGetState(int /*device*/, unsigned* flags,
                                                                                 int* active) {
  if (flags != nullptr) *flags = 0;
  *active = 1;
  return 0;
}
