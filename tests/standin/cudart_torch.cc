// libcudart.so, continued: what torch's CUDA build needs beyond the functions that multiring or its tests call.
//
// These functions are compiled against NVIDIA's headers, which only the environment of `make test-cuda` has.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "runtime.h"

namespace {

std::mutex kernels_mutex;
std::map<const void*, std::string> kernels;  // names by their functions on the host

cudaError_t as_error(int code) { return static_cast<cudaError_t>(code); }

// The stand-ins have no processor that could run a kernel. Operators of torch must not come here.
cudaError_t refuse_launch(const void* kernel) {
  const std::lock_guard lock(kernels_mutex);
  const auto found = kernels.find(kernel);
  std::fprintf(stderr, "cuda stand-in: a kernel was launched: %s\n",
               found == kernels.end() ? "(not registered)" : found->second.c_str());
  return cudaErrorNotSupported;
}

}  // namespace

extern "C" {
#pragma GCC visibility push(default)

cudaError_t cudaDriverGetVersion(int* version) {
  *version = static_cast<int>(standin::setting("STANDIN_DRIVER", 13000));
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int device) {
  if (device < 0 || device >= standin::device_count()) return cudaErrorInvalidDevice;
  std::memset(found, 0, sizeof *found);
  std::snprintf(found->name, sizeof found->name, "stand-in");
  found->totalGlobalMem = static_cast<size_t>(standin::setting("STANDIN_MEMORY_MB", 256)) << 20;
  found->major = standin::kMajor;
  found->multiProcessorCount = standin::kProcessors;
  found->warpSize = standin::kWarp;
  found->maxThreadsPerBlock = standin::kThreadsPerBlock;
  found->maxThreadsPerMultiProcessor = 2 * standin::kThreadsPerBlock;
  found->regsPerBlock = 1 << 16;
  found->regsPerMultiprocessor = 1 << 16;
  found->sharedMemPerBlock = 48 << 10;
  found->sharedMemPerMultiprocessor = 228 << 10;
  found->l2CacheSize = 50 << 20;
  for (int& each : found->maxThreadsDim) each = standin::kThreadsPerBlock;
  for (int& each : found->maxGridSize) each = (1 << 16) - 1;
  found->unifiedAddressing = 1;
  found->canMapHostMemory = 1;
  found->canUseHostPointerForRegisteredMem = 1;
  found->asyncEngineCount = 3;
  found->concurrentKernels = 1;
  found->pciBusID = device + 1;
  found->uuid.bytes[0] = static_cast<char>(device + 1);
  found->uuid.bytes[1] = static_cast<char>(standin::setting("STANDIN_HOST", 0));
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* found, cudaDeviceAttr attribute, int device) {
  return as_error(standin::attribute_of(attribute, device, found));
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  if (device < 0 || device >= standin::device_count()) return cudaErrorInvalidDevice;
  std::snprintf(text, size, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = static_cast<int>(device != peer);
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

// libcuda's stand-in is in the process already. A name stands for the newest version of the function.
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *found = ::dlsym(RTLD_DEFAULT, (std::string(name) + "_v2").c_str());
  if (*found == nullptr) *found = ::dlsym(RTLD_DEFAULT, name);
  if (result != nullptr)
    *result = *found == nullptr ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// --- memory

cudaError_t cudaHostAlloc(void** made, size_t bytes, unsigned) { return cudaMallocHost(made, bytes); }
cudaError_t cudaMallocAsync(void** made, size_t bytes, cudaStream_t) { return cudaMalloc(made, bytes); }
cudaError_t cudaFreeAsync(void* address, cudaStream_t stream) {
  return as_error(standin::release_on_stream(address, stream));
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  *pool = reinterpret_cast<cudaMemPool_t>(static_cast<uintptr_t>(device) + 1);
  return cudaSuccess;
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* found) {
  *static_cast<uint64_t*>(found) = 0;
  return cudaSuccess;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { return cudaSuccess; }
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                              cudaMemcpyKind kind, cudaStream_t stream) {
  for (size_t row = 0; row < height; ++row)
    if (const cudaError_t error = cudaMemcpyAsync(static_cast<char*>(to) + row * to_pitch,
                                                  static_cast<const char*>(from) + row * from_pitch, width, kind, stream))
      return error;
  return cudaSuccess;
}

// --- streams and events

cudaError_t cudaStreamCreate(cudaStream_t* made) { return cudaStreamCreateWithFlags(made, cudaStreamDefault); }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  return as_error(standin::priority_of(stream, priority));
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t called, void* argument, unsigned) {
  struct Call {
    cudaStream_t stream;
    cudaStreamCallback_t called;
    void* argument;
  };
  const auto run = [](void* held) {
    const Call call = *static_cast<Call*>(held);
    delete static_cast<Call*>(held);
    call.called(call.stream, cudaSuccess, call.argument);
  };
  return cudaLaunchHostFunc(stream, run, new Call{stream, called, argument});
}
cudaError_t cudaEventCreate(cudaEvent_t* made) { return cudaEventCreateWithFlags(made, cudaEventDefault); }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t* count) {
  uint64_t number = 0;
  *status = static_cast<cudaStreamCaptureStatus>(standin::capture_of(stream, &number));
  if (id != nullptr) *id = number;
  if (count != nullptr) *count = 0;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiate(made, graph, flags);
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = reinterpret_cast<standin::Graph*>(graph)->nodes.size();
  return cudaSuccess;
}

// --- kernels: their names are known, and none is run

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  const std::lock_guard lock(kernels_mutex);
  kernels[function] = name;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
char __cudaInitModule(void**) { return 1; }
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, cudaStream_t) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = *block = dim3{1, 1, 1};
  *shared = 0;
  *static_cast<void**>(stream) = nullptr;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return refuse_launch(kernel);
}
cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) { return refuse_launch(kernel); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* kernel, void**) { return refuse_launch(kernel); }
cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return refuse_launch(kernel);
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  std::memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = standin::kThreadsPerBlock;
  found->binaryVersion = found->ptxVersion = 10 * standin::kMajor;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 1;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 1;
  return cudaSuccess;
}

#pragma GCC visibility pop
}
