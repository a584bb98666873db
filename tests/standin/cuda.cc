// libcuda.so.1: the driver's functions. Unlike the runtime's, they need cuInit, and a context in each thread.
#include <cstring>
#include <vector>

#include "capture.h"
#include "declarations.h"
#include "runtime.h"

namespace {

// Calls `function` in the thread's context. A context is the device's number plus 1; null: none.
template <typename Function>
int call(Function function) {
  if (!standin::is_driver_initialized()) return standin::kNotInitialized;
  return standin::has_context() ? function() : static_cast<int>(standin::kInvalidContext);
}

// The devices whose contexts were current before those that this thread has pushed; -1: none.
thread_local std::vector<int> pushed;

void* pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

}  // namespace

extern "C" {
#pragma GCC visibility push(default)

int cuInit(unsigned) {
  standin::initialize_driver();
  return standin::device_count() == 0 ? standin::kNoDevice : standin::kOk;
}
int cuDriverGetVersion(int* version) {
  *version = static_cast<int>(standin::setting("STANDIN_DRIVER", 13000));
  return 0;
}
int cuDeviceGetCount(int* count) {
  *count = standin::device_count();
  return standin::is_driver_initialized() ? standin::kOk : standin::kNotInitialized;
}
int cuDeviceGetAttribute(int* found, int attribute, int device) {
  return standin::attribute_of(attribute, device, found);
}
int cuDevicePrimaryCtxRetain(void** made, int device) {
  if (!standin::is_driver_initialized()) return standin::kNotInitialized;
  if (device < 0 || device >= standin::device_count()) return standin::kInvalidDevice;
  *made = pointer(static_cast<uint64_t>(device) + 1);
  return standin::state_code();
}
int cuDevicePrimaryCtxRelease_v2(int) { return 0; }
int cuCtxSetCurrent(void* made) {
  if (!standin::is_driver_initialized()) return standin::kNotInitialized;
  if (made != nullptr) return standin::select_device(static_cast<int>(reinterpret_cast<uintptr_t>(made)) - 1);
  standin::drop_context();
  return standin::kOk;
}
int cuCtxGetCurrent(void** made) {
  *made = pointer(standin::has_context() ? static_cast<uint64_t>(standin::current_device()) + 1 : 0);
  return 0;
}
int cuCtxPushCurrent_v2(void* made) {
  pushed.push_back(standin::has_context() ? standin::current_device() : -1);
  return cuCtxSetCurrent(made);
}
int cuCtxPopCurrent_v2(void** made) {
  cuCtxGetCurrent(made);
  if (pushed.empty()) return standin::kInvalidContext;
  const int before = pushed.back();
  pushed.pop_back();
  return cuCtxSetCurrent(before < 0 ? nullptr : pointer(static_cast<uint64_t>(before) + 1));
}
int cuStreamGetCtx(void* stream, void** made) {
  const int device = standin::device_of_stream(stream);
  *made = pointer(static_cast<uint64_t>(device) + 1);
  return device < 0 ? standin::kInvalidHandle : standin::kOk;
}
int cuGetErrorString(int code, const char** text) {
  *text = standin::text_of(code);
  return 0;
}

int cuMemAlloc_v2(uint64_t* made, size_t bytes) {
  return call([=] { return standin::allocate(reinterpret_cast<void**>(made), bytes); });
}
int cuMemFree_v2(uint64_t address) {
  return call([=] { return standin::release(pointer(address)); });
}
int cuMemGetInfo_v2(size_t* left, size_t* all) {
  return call([=] { return standin::memory_left(left, all); });
}
int cuMemHostAlloc(void** made, size_t bytes, unsigned) {
  return call([=] { return standin::allocate_pinned(made, bytes); });
}
int cuMemFreeHost(void* address) {
  return call([=] { return standin::release_pinned(address); });
}
int cuMemHostRegister_v2(void* address, size_t bytes, unsigned flags) {
  return call([=] { return standin::register_host(address, bytes, flags); });
}
int cuMemHostUnregister(void* address) {
  return call([=] { return standin::unregister_host(address); });
}
int cuMemcpyHtoDAsync_v2(uint64_t to, void* from, size_t bytes, void* stream) {
  return call([=] { return standin::copy(pointer(to), from, bytes, 1, stream, false); });
}
int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void* stream) {
  return call([=] { return standin::copy(to, pointer(from), bytes, 2, stream, false); });
}
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void* stream) {
  return call([=] { return standin::copy(pointer(to), pointer(from), bytes, 3, stream, false); });
}
int cuPointerGetAttribute(void* found, int attribute, uint64_t address) {
  const standin::Place place = standin::place_of(pointer(address));
  if (place.kind == standin::MemoryKind::pageable) return standin::kInvalidValue;
  const bool is_device = place.kind == standin::MemoryKind::device;
  switch (attribute) {
    case 2: *static_cast<unsigned*>(found) = is_device ? 2 : 1; return 0;  // the kind of memory
    case 9: *static_cast<int*>(found) = place.device; return 0;            // the device's number
    default: return standin::kNotSupported;
  }
}

int cuStreamCreate(void** made, unsigned flags) {
  return call([=] { return standin::make_stream(made, flags, 0); });
}
int cuStreamCreateWithPriority(void** made, unsigned flags, int priority) {
  return call([=] { return standin::make_stream(made, flags, priority); });
}
int cuStreamDestroy_v2(void* stream) {
  return call([=] { return standin::destroy_stream(stream); });
}
int cuStreamQuery(void* stream) {
  return call([=] { return standin::query_stream(stream); });
}
int cuStreamSynchronize(void* stream) {
  return call([=] { return standin::wait_for_stream(stream); });
}
int cuStreamIsCapturing(void* stream, int* status) {
  return call([=] {
    if (standin::device_of_stream(stream) < 0) return static_cast<int>(standin::kInvalidHandle);
    *status = standin::capture_of(stream, nullptr);
    return static_cast<int>(standin::kOk);
  });
}
int cuThreadExchangeStreamCaptureMode(int* mode) {
  *mode = static_cast<int>(standin::Captures::exchange(static_cast<standin::CaptureMode>(*mode)));
  return standin::kOk;
}
int cuStreamWaitEvent(void* stream, void* event, unsigned) {
  return call([=] { return standin::have_stream_wait(stream, event); });
}
int cuStreamWaitValue32_v2(void* stream, uint64_t address, unsigned value, unsigned condition) {
  return call([=] { return standin::wait_for_value(stream, pointer(address), value, condition); });
}
int cuStreamWriteValue32_v2(void* stream, uint64_t address, unsigned value, unsigned) {
  return call([=] { return standin::write_value(stream, pointer(address), value); });
}
int cuEventCreate(void** made, unsigned flags) {
  return call([=] { return standin::make_event(made, flags); });
}
int cuEventDestroy_v2(void* event) {
  return call([=] { return standin::destroy_event(event); });
}
int cuEventRecord(void* event, void* stream) {
  return call([=] { return standin::record_event(event, stream); });
}
int cuEventQuery(void* event) {
  return call([=] { return standin::query_event(event); });
}
int cuEventElapsedTime(float* ms, void* first, void* second) {
  return call([=] { return standin::elapsed_ms(ms, first, second); });
}
int cuEventSynchronize(void* event) {
  return call([=] { return standin::wait_for_event(event); });
}

#pragma GCC visibility pop
}
