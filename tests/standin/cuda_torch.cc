// libcuda.so.1, continued: what torch's CUDA build needs of the driver beyond what multiring calls.
#include <cuda.h>

#include <cstdio>

#include "runtime.h"

extern "C" {
#pragma GCC visibility push(default)

CUresult cuDeviceGet(CUdevice* device, int number) {
  *device = number;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetName(char* text, int size, CUdevice) {
  std::snprintf(text, size, "stand-in");
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = 1;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetDevice(CUdevice* device) {
  *device = standin::current_device();
  return standin::has_context() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

#pragma GCC visibility pop
}
