// libcudart.so: the runtime's functions.
#include <cstdio>
#include <cstring>

#include "declarations.h"
#include "runtime.h"

namespace {

thread_local int last = 0;
bool is_reset = false;

// Remembers an error for cudaGetLastError. "Not ready" is no error.
int noted(int code) {
  if (code != standin::kOk && code != standin::kNotReady) last = code;
  return code;
}

// Calls `function` with a context of the thread, unless the device was reset after an error that stays.
template <typename Function>
int call(Function function) {
  standin::initialize_driver();
  if (!standin::has_context()) standin::select_device(standin::current_device());
  return noted(is_reset ? static_cast<int>(standin::kDevicesUnavailable) : function());
}

}  // namespace

extern "C" {
#pragma GCC visibility push(default)

int cudaGetDeviceCount(int* count) {
  *count = standin::device_count();
  return *count == 0 ? noted(standin::kNoDevice) : 0;
}
int cudaSetDevice(int device) {
  standin::initialize_driver();
  return noted(standin::select_device(device));
}
int cudaGetDevice(int* device) {
  *device = standin::current_device();
  return 0;
}
int cudaDeviceReset() {
  is_reset = true;
  return 0;
}
int cudaDeviceSynchronize() { return call([] { return standin::wait_for_device(); }); }
int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return 0;
}
int cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return 0;
}

int cudaGetLastError() {
  if (standin::state_code() == standin::kNotInitialized) return standin::kNotInitialized;
  const int code = last;
  last = 0;
  return code;
}
int cudaPeekAtLastError() { return last; }
const char* cudaGetErrorName(int code) { return standin::name_of(code); }
const char* cudaGetErrorString(int code) { return standin::text_of(code); }

int cudaMalloc(void** made, size_t bytes) { return call([=] { return standin::allocate(made, bytes); }); }
int cudaFree(void* address) { return call([=] { return standin::release(address); }); }
int cudaMemGetInfo(size_t* left, size_t* all) { return call([=] { return standin::memory_left(left, all); }); }
int cudaMallocHost(void** made, size_t bytes) { return call([=] { return standin::allocate_pinned(made, bytes); }); }
int cudaFreeHost(void* address) { return call([=] { return standin::release_pinned(address); }); }
int cudaHostRegister(void* address, size_t bytes, unsigned flags) {
  return call([=] { return standin::register_host(address, bytes, flags); });
}
int cudaHostUnregister(void* address) { return call([=] { return standin::unregister_host(address); }); }
int cudaPointerGetAttributes(void* attributes, void* address) {
  struct Found {
    int type;
    int device;
    const void* on_device;
    const void* on_host;
  } found{};
  const standin::Place place = standin::place_of(address);
  found.type = static_cast<int>(place.kind);
  found.device = place.device;
  if (place.kind != standin::MemoryKind::pageable) found.on_device = address;
  if (place.kind != standin::MemoryKind::device) found.on_host = address;
  std::memcpy(attributes, &found, sizeof found);
  return 0;
}

int cudaMemcpyAsync(void* to, void* from, size_t bytes, int kind, void* stream) {
  return call([=] { return standin::copy(to, from, bytes, kind, stream, false); });
}
int cudaMemcpy(void* to, void* from, size_t bytes, int kind) {
  return call([=] { return standin::copy(to, from, bytes, kind, nullptr, true); });
}
int cudaMemsetAsync(void* to, int value, size_t bytes, void* stream) {
  return call([=] { return standin::fill(to, value, bytes, stream, false); });
}
int cudaMemset(void* to, int value, size_t bytes) {
  return call([=] { return standin::fill(to, value, bytes, nullptr, false); });
}

int cudaStreamCreateWithFlags(void** made, unsigned flags) {
  return call([=] { return standin::make_stream(made, flags, 0); });
}
int cudaStreamCreateWithPriority(void** made, unsigned flags, int priority) {
  return call([=] { return standin::make_stream(made, flags, priority); });
}
int cudaStreamDestroy(void* stream) { return call([=] { return standin::destroy_stream(stream); }); }
int cudaStreamQuery(void* stream) { return call([=] { return standin::query_stream(stream); }); }
int cudaStreamSynchronize(void* stream) { return call([=] { return standin::wait_for_stream(stream); }); }
int cudaStreamWaitEvent(void* stream, void* event, unsigned) {
  return call([=] { return standin::have_stream_wait(stream, event); });
}
int cudaLaunchHostFunc(void* stream, void* function, void* argument) {
  const auto called = reinterpret_cast<void (*)(void*)>(function);
  return call([=] { return standin::call_on_stream(stream, called, argument); });
}

int cudaEventCreateWithFlags(void** made, unsigned flags) {
  return call([=] { return standin::make_event(made, flags); });
}
int cudaEventDestroy(void* event) { return call([=] { return standin::destroy_event(event); }); }
int cudaEventRecord(void* event, void* stream) { return call([=] { return standin::record_event(event, stream); }); }
int cudaEventQuery(void* event) { return call([=] { return standin::query_event(event); }); }
int cudaEventSynchronize(void* event) { return call([=] { return standin::wait_for_event(event); }); }
int cudaEventElapsedTime(float* ms, void* first, void* second) {
  return call([=] { return standin::elapsed_ms(ms, first, second); });
}

int cudaStreamBeginCapture(void* stream, int mode) { return call([=] { return standin::begin_capture(stream, mode); }); }
int cudaStreamEndCapture(void* stream, void** made) {
  return call([=] { return standin::end_capture(stream, reinterpret_cast<standin::Graph**>(made)); });
}
int cudaStreamIsCapturing(void* stream, int* status) {
  *status = standin::capture_of(stream, nullptr);
  return 0;
}
int cudaThreadExchangeStreamCaptureMode(int* mode) {
  *mode = static_cast<int>(standin::Captures::exchange(static_cast<standin::CaptureMode>(*mode)));
  return 0;
}
int cudaGraphInstantiate(void** made, void* graph, uint64_t) {
  *made = new standin::Graph(*static_cast<standin::Graph*>(graph));
  return 0;
}
int cudaGraphLaunch(void* graph, void* stream) {
  return call([=] { return standin::launch(*static_cast<standin::Graph*>(graph), stream); });
}
int cudaGraphDestroy(void* graph) {
  delete static_cast<standin::Graph*>(graph);
  return 0;
}
int cudaGraphExecDestroy(void* graph) { return cudaGraphDestroy(graph); }

int cudaIpcGetMemHandle(void* handle, void* address) {
  static_assert(sizeof(standin::MemoryHandle) <= sizeof(IpcHandle));
  return call([=] { return standin::make_handle(static_cast<standin::MemoryHandle*>(handle), address); });
}
int cudaIpcOpenMemHandle(void** made, IpcHandle handle, unsigned) {
  standin::MemoryHandle opened{};
  std::memcpy(&opened, &handle, sizeof opened);
  return call([=] { return standin::open_handle(made, opened); });
}
int cudaIpcCloseMemHandle(void* address) { return call([=] { return standin::close_handle(address); }); }
// No stand-in opens an event of another process.
int cudaIpcGetEventHandle(void*, void* event) { return call([=] { return standin::check_for_handle(event); }); }

#pragma GCC visibility pop
}
