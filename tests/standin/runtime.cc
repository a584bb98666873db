#include "runtime.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "capture.h"
#include "memory.h"

namespace standin {
namespace {

struct Device {
  Device(int number, size_t bytes) : memory(bytes), streams(number) {}
  DeviceMemory memory;
  DeviceStreams streams;
};

class Machine {
 public:
  Machine() {
    const long count = setting("STANDIN_DEVICES", 2);
    const size_t bytes = static_cast<size_t>(setting("STANDIN_MEMORY_MB", 256)) << 20;
    for (int number = 0; number < count; ++number) devices_.push_back(std::make_unique<Device>(number, bytes));
    pthread_atfork(nullptr, nullptr, [] { is_forked = true; });
  }
  int count() const { return static_cast<int>(devices_.size()); }
  Device& device(int number) { return *devices_[number]; }
  // Returns the memory in which an address lies, and its device; null for the host's.
  DeviceMemory* memory_of(const void* address, int* device = nullptr) {
    for (int number = 0; number < count(); ++number)
      if (devices_[number]->memory.sees(address)) {
        if (device != nullptr) *device = number;
        return &devices_[number]->memory;
      }
    const std::lock_guard lock(opened_mutex_);
    for (const Opened& each : opened_)
      if (each.memory->sees(address)) {
        if (device != nullptr) *device = each.device;
        return each.memory.get();
      }
    return nullptr;
  }
  int device_of(const void* address) {
    int device = -1;
    memory_of(address, &device);
    return device;
  }
  // Opens the memory of another process's device; null if that process has ended.
  DeviceMemory* open(int process, int file, size_t bytes, int device) {
    const std::lock_guard lock(opened_mutex_);
    for (const Opened& each : opened_)
      if (each.process == process && each.file == file) return each.memory.get();
    const std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(file);
    char target[64] = {};
    if (::readlink(path.c_str(), target, sizeof target - 1) < 0) return nullptr;
    if (std::strncmp(target, "/memfd:standin", 14) != 0) return nullptr;
    const int own = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (own < 0) return nullptr;
    opened_.push_back({process, file, device, std::make_unique<DeviceMemory>(own, bytes)});
    return opened_.back().memory.get();
  }
  void wait() {
    for (auto& each : devices_) each->streams.wait();
  }

  static std::atomic<bool> is_forked;
  std::atomic<int> sticky{0};
  std::atomic<int> fails_after{-1};  // calls until `failure` is returned; -1: never
  std::atomic<int> failure{0};
  std::atomic<int> allocations_left{-1};  // until one that finds no room; -1: none will
  std::atomic<int> allocations_failing{0};
  bool has_room() {
    if (allocations_left < 0 || allocations_left-- > 0) return true;
    if (--allocations_failing > 0) allocations_left = 0;
    return false;
  }
  PinnedRanges pinned;

  std::shared_ptr<Event> event_of(void* handle) {
    const std::lock_guard lock(events_mutex_);
    const auto found = events_.find(handle);
    return found == events_.end() ? nullptr : found->second;
  }
  void* add(std::shared_ptr<Event> event) {
    const std::lock_guard lock(events_mutex_);
    void* handle = event.get();
    events_[handle] = std::move(event);
    return handle;
  }
  bool remove_event(void* handle) {
    const std::lock_guard lock(events_mutex_);
    return events_.erase(handle) != 0;
  }

 private:
  // The memory of another process's device. It stays mapped.
  struct Opened {
    int process;
    int file;
    int device;
    std::unique_ptr<DeviceMemory> memory;
  };
  std::vector<std::unique_ptr<Device>> devices_;
  std::mutex opened_mutex_;
  std::vector<Opened> opened_;
  std::mutex events_mutex_;
  std::unordered_map<void*, std::shared_ptr<Event>> events_;
};
std::atomic<bool> Machine::is_forked{false};

// Never destroyed: streams may work until the process ends.
Machine& machine() {
  static auto* made = new Machine;
  return *made;
}

thread_local int current = 0;
thread_local bool has_own_context = false;
std::atomic<bool> is_initialized{false};
thread_local bool is_in_host_function = false;
std::atomic<long> host_waits{0};
thread_local long own_host_waits = 0;

void count_host_wait() {
  ++host_waits;
  ++own_host_waits;
}

// Returns the stream of a handle: 0, 1 and 2 are the legacy stream of the current device. Null if it is not valid.
StreamPointer stream_of(void* handle) {
  if (reinterpret_cast<uintptr_t>(handle) <= 2) return machine().device(current).streams.legacy();
  auto* stream = static_cast<Stream*>(handle);
  for (int number = 0; number < machine().count(); ++number)
    if (machine().device(number).streams.has(stream)) return stream->shared_from_this();
  return nullptr;
}

MarkPointer mark_that_is_set() {
  auto made = std::make_shared<Mark>();
  made->set();
  return made;
}

// Puts work on a stream, or into its capture.
MarkPointer push(const StreamPointer& stream, Work work, bool is_work) {
  if (const CapturePointer capture = captures().of(stream.get())) {
    if (work) capture->add(stream.get(), [work] { return work; });
    return mark_that_is_set();
  }
  DeviceStreams& streams = machine().device(stream->device()).streams;
  if (!work) return streams.push(stream, nullptr, is_work);
  const auto run = [work = std::move(work)] {
    if (machine().sticky == 0) work();
  };
  return streams.push(stream, run, is_work);
}

int wait(const MarkPointer& mark) {
  count_host_wait();
  if (mark != nullptr) mark->wait();
  return state_code();
}

// Returns the error of asking for an event while a stream is captured; it spoils the capture.
int refuse_captured(Event& event) {
  const std::lock_guard lock(event.mutex);
  if (event.capture == nullptr) return captures().refuse();
  event.capture->invalidate();
  return kCapturedEvent;
}

// A call that frees memory waits for all work of all devices.
void wait_for_all() {
  count_host_wait();
  machine().wait();
}

}  // namespace

struct Here {
  int fails_after = -1;  // calls until `failure` is returned; -1: never
  int failure = 0;
};
thread_local Here here;

int state_code() {
  if (Machine::is_forked) return kNotInitialized;
  if (is_in_host_function) return kNotPermitted;
  Machine& all = machine();
  if (all.sticky != 0) return all.sticky;
  if (all.fails_after >= 0 && all.fails_after-- == 0) {
    if (is_sticky(all.failure)) all.sticky = all.failure.load();
    return all.failure;
  }
  if (here.fails_after >= 0 && here.fails_after-- == 0) return here.failure;
  return kOk;
}

int device_count() { return machine().count(); }
int attribute_of(int attribute, int device, int* found) {
  if (device < 0 || device >= machine().count()) return kInvalidDevice;
  switch (attribute) {
    case 1: *found = kThreadsPerBlock; break;
    case 10: *found = kWarp; break;
    case 16: *found = kProcessors; break;
    case 33: *found = device + 1; break;  // the number of the bus
    case 41:                              // one space of addresses
    case 91:                              // registered memory has the same address on the device
    case 99:                              // host memory can be registered
    case 122: *found = 1; break;          // a stream can wait for a value of 64 bits in memory
    case 75: *found = kMajor; break;
    default: *found = 0;
  }
  return kOk;
}
int current_device() { return current; }

int select_device(int device) {
  if (device < 0 || device >= machine().count()) return kInvalidDevice;
  current = device;
  has_own_context = true;
  return kOk;
}

bool has_context() { return has_own_context; }
void drop_context() { has_own_context = false; }
bool is_driver_initialized() { return is_initialized; }
void initialize_driver() { is_initialized = true; }

int allocate(void** made, size_t bytes) {
  if (const int code = state_code()) return code;
  if (const int code = captures().refuse()) return code;
  if (made == nullptr) return kInvalidValue;
  if (bytes == 0) return kInvalidValue;
  void* found = machine().has_room() ? machine().device(current).memory.allocate(bytes) : nullptr;
  if (found == nullptr) return kOutOfMemory;
  *made = found;
  return kOk;
}

int release(void* address) {
  if (const int code = state_code()) return code;
  if (const int code = captures().refuse()) return code;
  if (address == nullptr) return kOk;
  const int device = machine().device_of(address);
  if (device < 0) return kInvalidValue;
  wait_for_all();
  return machine().device(device).memory.release(address) ? state_code() : static_cast<int>(kInvalidValue);
}

int release_on_stream(void* address, void* handle) {
  if (const int code = state_code()) return code;
  const int device = machine().device_of(address);
  const StreamPointer stream = stream_of(handle);
  if (stream == nullptr) return kInvalidHandle;
  if (device < 0 || !machine().device(device).memory.holds(address, 1)) return kInvalidValue;
  push(stream, [address, device] { machine().device(device).memory.release(address); }, true);
  return kOk;
}

int memory_left(size_t* free_bytes, size_t* all_bytes) {
  if (const int code = state_code()) return code;
  const DeviceMemory& memory = machine().device(current).memory;
  *free_bytes = memory.bytes() - memory.used();
  *all_bytes = memory.bytes();
  return kOk;
}

int allocate_pinned(void** made, size_t bytes) {
  if (const int code = state_code()) return code;
  if (const int code = captures().refuse()) return code;
  *made = machine().has_room() ? machine().pinned.allocate(bytes) : nullptr;
  return *made == nullptr ? kOutOfMemory : kOk;
}

int release_pinned(void* address) {
  if (const int code = state_code()) return code;
  if (const int code = captures().refuse()) return code;
  wait_for_all();
  return machine().pinned.release(address);
}

int register_host(void* address, size_t bytes, unsigned flags) {
  if (const int code = state_code()) return code;
  if (const int code = captures().refuse()) return code;
  return machine().pinned.add(address, bytes, (flags & 8) != 0);
}

int unregister_host(void* address) {
  if (const int code = state_code()) return code;
  if (const int code = captures().refuse()) return code;
  wait_for_all();
  return machine().pinned.remove(address);
}

Place place_of(const void* address) {
  const int device = machine().device_of(address);
  if (device >= 0) return {MemoryKind::device, device};
  if (machine().pinned.cover(address, 1)) return {MemoryKind::pinned, 0};
  return {MemoryKind::pageable, -2};
}

void* reached(const void* address) {
  const DeviceMemory* memory = machine().memory_of(address);
  return memory == nullptr ? const_cast<void*>(address) : memory->reached(address);
}

int make_handle(MemoryHandle* handle, const void* address) {
  if (const int code = state_code()) return code;
  const int device = machine().device_of(address);
  if (device < 0) return kInvalidValue;
  const DeviceMemory& memory = machine().device(device).memory;
  *handle = {::getpid(), memory.file(), memory.bytes(), 0, 0};
  return memory.find(address, &handle->offset, &handle->bytes) ? kOk : kInvalidValue;
}

int open_handle(void** made, const MemoryHandle& handle) {
  if (const int code = state_code()) return code;
  if (handle.process == ::getpid()) return kInvalidContext;
  DeviceMemory* memory = machine().open(handle.process, handle.file, handle.all, current);
  if (memory == nullptr) return kInvalidHandle;
  *made = memory->open(handle.offset, handle.bytes);
  return kOk;
}

int close_handle(const void* address) {
  if (const int code = state_code()) return code;
  DeviceMemory* memory = machine().memory_of(address);
  if (memory == nullptr) return kInvalidValue;
  wait_for_all();
  return memory->close(address) ? kOk : kInvalidValue;
}

int check_for_handle(void* event_handle) {
  if (const int code = state_code()) return code;
  const auto event = machine().event_of(event_handle);
  return event != nullptr && (event->flags & 4) != 0 ? kOk : kInvalidHandle;
}

int copy(void* to, const void* from, size_t bytes, int kind, void* handle, bool waits) {
  if (const int code = state_code()) return code;
  if (kind < 0 || kind > 4) return kInvalidDirection;
  if (bytes == 0) return kOk;
  if (to == nullptr || from == nullptr) return kInvalidValue;
  const StreamPointer stream = stream_of(handle);
  if (stream == nullptr) return kInvalidHandle;
  for (const void* each : {static_cast<const void*>(to), from}) {
    const DeviceMemory* memory = machine().memory_of(each);
    if (memory != nullptr && !memory->holds(each, bytes)) return kInvalidValue;
  }
  void* target = reached(to);
  Work work;
  if (place_of(from).kind == MemoryKind::pageable && place_of(to).kind == MemoryKind::device) {
    // The source of such a copy may be changed when the call has returned.
    const auto* start = static_cast<const char*>(from);
    work = [target, bytes, kept = std::vector<char>(start, start + bytes)] {
      std::memcpy(target, kept.data(), bytes);
    };
  } else {
    work = [target, source = reached(from), bytes] { std::memmove(target, source, bytes); };
    waits |= place_of(to).kind == MemoryKind::pageable || place_of(from).kind == MemoryKind::pageable;
  }
  const MarkPointer mark = push(stream, std::move(work), true);
  return waits && captures().of(stream.get()) == nullptr ? wait(mark) : static_cast<int>(kOk);
}

int fill(void* to, int value, size_t bytes, void* handle, bool waits) {
  if (const int code = state_code()) return code;
  if (bytes == 0) return kOk;
  const DeviceMemory* memory = machine().memory_of(to);
  const StreamPointer stream = stream_of(handle);
  if (stream == nullptr) return kInvalidHandle;
  if (memory == nullptr || !memory->holds(to, bytes)) return kInvalidValue;
  const MarkPointer mark = push(stream, [target = reached(to), value, bytes] { std::memset(target, value, bytes); }, true);
  return waits ? wait(mark) : static_cast<int>(kOk);
}

int make_stream(void** made, unsigned flags, int priority) {
  if (const int code = state_code()) return code;
  *made = machine().device(current).streams.make(flags, priority).get();
  return kOk;
}

int destroy_stream(void* handle) {
  if (const int code = state_code()) return code;
  for (int number = 0; number < machine().count(); ++number)
    if (machine().device(number).streams.drop(static_cast<Stream*>(handle))) return kOk;
  return kInvalidHandle;
}

int priority_of(void* handle, int* priority) {
  if (const int code = state_code()) return code;
  const StreamPointer stream = stream_of(handle);
  if (stream == nullptr) return kInvalidHandle;
  *priority = stream->priority();
  return kOk;
}

int query_stream(void* handle) {
  if (const int code = state_code()) return code;
  const StreamPointer stream = stream_of(handle);
  if (stream == nullptr) return kInvalidHandle;
  if (const int code = captures().refuse(stream.get())) return code;
  return stream->is_idle() ? kOk : kNotReady;
}

int wait_for_stream(void* handle) {
  if (const int code = state_code()) return code;
  const StreamPointer stream = stream_of(handle);
  if (stream == nullptr) return kInvalidHandle;
  if (const int code = captures().refuse(stream.get())) return code;
  return wait(push(stream, nullptr, false));
}

int have_stream_wait(void* handle, void* event_handle) {
  if (const int code = state_code()) return code;
  const StreamPointer stream = stream_of(handle);
  const auto event = machine().event_of(event_handle);
  if (stream == nullptr || event == nullptr) return kInvalidHandle;
  const std::lock_guard lock(event->mutex);
  const CapturePointer own = captures().of(stream.get());
  if (event->capture != nullptr) {
    if (!captures().has(event->capture)) return kCapturedEvent;
    if (!event->capture->is_valid()) return kCaptureInvalidated;
    if (own != nullptr && own != event->capture) return kCaptureIsolation;
    event->capture->join(stream.get(), event->before);
    return kOk;
  }
  if (event->mark == nullptr) return kOk;
  if (own != nullptr) {
    own->invalidate();
    return kCaptureIsolation;
  }
  if (event->mark->is_set()) return kOk;
  const auto wait = [mark = event->mark] { mark->wait(); };
  machine().device(stream->device()).streams.push(stream, wait, false);
  return kOk;
}

int call_on_stream(void* handle, void (*function)(void*), void* argument) {
  if (const int code = state_code()) return code;
  const StreamPointer stream = stream_of(handle);
  if (stream == nullptr) return kInvalidHandle;
  const auto work = [function, argument] {
    is_in_host_function = true;
    function(argument);
    is_in_host_function = false;
  };
  push(stream, work, true);
  return kOk;
}

int wait_for_value(void* handle, void* address, unsigned value, unsigned condition) {
  if (const int code = state_code()) return code;
  const StreamPointer stream = stream_of(handle);
  if (stream == nullptr) return kInvalidHandle;
  if (place_of(address).kind == MemoryKind::pageable || condition > 3) return kInvalidValue;
  const auto* word = static_cast<const volatile uint32_t*>(reached(address));
  const auto is_met = [word, value, condition] {
    const uint32_t found = *word;
    switch (condition) {
      case 0: return static_cast<int32_t>(found - value) >= 0;
      case 1: return found == value;
      case 2: return (found & value) != 0;
      default: return (~(found | value)) != 0;
    }
  };
  const auto work = [is_met] {
    while (!is_met() && machine().sticky == 0) std::this_thread::sleep_for(std::chrono::microseconds(20));
  };
  push(stream, work, true);
  return kOk;
}

int write_value(void* handle, void* address, unsigned value) {
  if (const int code = state_code()) return code;
  const StreamPointer stream = stream_of(handle);
  if (stream == nullptr) return kInvalidHandle;
  if (place_of(address).kind == MemoryKind::pageable) return kInvalidValue;
  auto* word = static_cast<volatile uint32_t*>(reached(address));
  push(stream, [word, value] { *word = value; }, true);
  return kOk;
}

int wait_for_device() {
  if (const int code = state_code()) return code;
  if (const int code = captures().refuse()) return code;
  count_host_wait();
  machine().device(current).streams.wait();
  return state_code();
}

int make_event(void** made, unsigned flags) {
  if (const int code = state_code()) return code;
  if ((flags & 4) != 0 && (flags & 2) == 0) return kInvalidValue;  // an event for other processes has no timing
  auto event = std::make_shared<Event>();
  event->device = current;
  event->flags = flags;
  *made = machine().add(std::move(event));
  return kOk;
}

int destroy_event(void* handle) {
  if (const int code = state_code()) return code;
  return machine().remove_event(handle) ? kOk : kInvalidHandle;
}

int record_event(void* event_handle, void* handle) {
  if (const int code = state_code()) return code;
  const StreamPointer stream = stream_of(handle);
  const auto event = machine().event_of(event_handle);
  if (stream == nullptr || event == nullptr || event->device != stream->device()) return kInvalidHandle;
  const std::lock_guard lock(event->mutex);
  event->capture = captures().of(stream.get());
  if (event->capture != nullptr) {
    if (!event->capture->is_valid()) return kCaptureInvalidated;
    event->before = event->capture->clock(stream.get());
    return kOk;
  }
  event->mark = push(stream, nullptr, false);
  return kOk;
}

int query_event(void* handle) {
  if (const int code = state_code()) return code;
  const auto event = machine().event_of(handle);
  if (event == nullptr) return kInvalidHandle;
  if (const int code = refuse_captured(*event)) return code;
  const MarkPointer mark = event->recorded();
  return mark == nullptr || mark->is_set() ? kOk : kNotReady;
}

int wait_for_event(void* handle) {
  if (const int code = state_code()) return code;
  const auto event = machine().event_of(handle);
  if (event == nullptr) return kInvalidHandle;
  if (const int code = refuse_captured(*event)) return code;
  return wait(event->recorded());
}

int elapsed_ms(float* ms, void* first_handle, void* last_handle) {
  if (const int code = state_code()) return code;
  const auto first = machine().event_of(first_handle);
  const auto last = machine().event_of(last_handle);
  if (first == nullptr || last == nullptr || ((first->flags | last->flags) & 2) != 0) return kInvalidHandle;
  const MarkPointer from = first->recorded();
  const MarkPointer to = last->recorded();
  if (from == nullptr || to == nullptr) return kInvalidHandle;
  if (!from->is_set() || !to->is_set()) return kNotReady;
  *ms = std::chrono::duration<float, std::milli>(to->when() - from->when()).count();
  return kOk;
}

int begin_capture(void* handle, int mode) {
  if (const int code = state_code()) return code;
  const StreamPointer stream = stream_of(handle);
  if (stream == nullptr) return kInvalidHandle;
  const bool is_legacy = stream == machine().device(stream->device()).streams.legacy();
  return is_legacy ? static_cast<int>(kCaptureUnsupported)
                   : captures().begin(stream.get(), static_cast<CaptureMode>(mode));
}

int end_capture(void* handle, Graph** made) {
  if (const int code = state_code()) return code;
  const StreamPointer stream = stream_of(handle);
  return stream == nullptr ? static_cast<int>(kInvalidHandle) : captures().end(stream.get(), made);
}

int capture_of(void* handle, uint64_t* id) {
  const StreamPointer stream = stream_of(handle);
  const CapturePointer capture = stream == nullptr ? nullptr : captures().of(stream.get());
  if (id != nullptr) *id = capture == nullptr ? 0 : capture->id();
  if (capture == nullptr) return 0;
  return capture->is_valid() ? 1 : 2;
}

int launch(const Graph& graph, void* handle) {
  if (const int code = state_code()) return code;
  const StreamPointer stream = stream_of(handle);
  if (stream == nullptr) return kInvalidHandle;
  if (const CapturePointer capture = captures().of(stream.get())) {
    for (const WorkMaker& each : graph.nodes) capture->add(stream.get(), each);
    return kOk;
  }
  for (const WorkMaker& each : graph.nodes) push(stream, each(), true);
  return kOk;
}

bool enqueue_made(void* handle, const WorkMaker& maker) {
  const StreamPointer stream = stream_of(handle);
  const CapturePointer capture = stream == nullptr ? nullptr : captures().of(stream.get());
  if (capture == nullptr) return false;
  capture->add(stream.get(), maker);
  return true;
}

MarkPointer enqueue(void* handle, Work work) {
  const StreamPointer stream = stream_of(handle);
  return stream == nullptr ? nullptr : push(stream, std::move(work), true);
}

MarkPointer mark_of(void* handle) {
  const StreamPointer stream = stream_of(handle);
  return stream == nullptr ? nullptr : push(stream, nullptr, false);
}

int device_of_stream(void* handle) {
  const StreamPointer stream = stream_of(handle);
  return stream == nullptr ? -1 : stream->device();
}

const char* name_of(int code) {
  switch (code) {
    case kOk: return "cudaSuccess";
    case kInvalidValue: return "cudaErrorInvalidValue";
    case kOutOfMemory: return "cudaErrorMemoryAllocation";
    case kNotInitialized: return "cudaErrorInitializationError";
    case kInvalidHandle: return "cudaErrorInvalidResourceHandle";
    case kNotReady: return "cudaErrorNotReady";
    case kAssert: return "cudaErrorAssert";
    case kNotSupported: return "cudaErrorNotSupported";
    case kCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
    case kCaptureInvalidated: return "cudaErrorStreamCaptureInvalidated";
    case kCapturedEvent: return "cudaErrorCapturedEvent";
    default: return "cudaErrorUnknown";
  }
}

const char* text_of(int code) {
  switch (code) {
    case kOk: return "no error";
    case kInvalidValue: return "invalid argument";
    case kOutOfMemory: return "out of memory";
    case kNotInitialized: return "initialization error";
    case kNoDevice: return "no CUDA-capable device is detected";
    case kInvalidDevice: return "invalid device ordinal";
    case kInvalidContext: return "invalid device context";
    case kInvalidHandle: return "invalid resource handle";
    case kNotReady: return "device not ready";
    case kAssert: return "device-side assert triggered";
    case kFirstSticky: return "an illegal memory access was encountered";
    case kAlreadyRegistered: return "part or all of the requested memory range is already mapped";
    case kNotRegistered: return "pointer does not correspond to a registered memory region";
    case kNotPermitted: return "operation not permitted";
    case kNotSupported: return "operation not supported";
    case kCaptureUnsupported: return "operation not permitted when stream is capturing";
    case kCaptureInvalidated: return "operation failed due to a previous error during capture";
    case kCapturedEvent: return "operation not permitted on an event last recorded in a capturing stream";
    default: return "unrecognized error code";
  }
}

}  // namespace standin

// Controls for tests.
extern "C" {
#pragma GCC visibility push(default)

// The call after the next `calls` calls fails with `code`. An illegal address and its like stay.
void standin_fail(int code, int calls) {
  standin::machine().failure = code;
  standin::machine().fails_after = calls;
}

// Returns how many calls are left before that failure; -1: it has come.
int standin_fail_left() { return standin::machine().fails_after; }

// The same for the calls of this thread. Returns how many calls were left before an earlier failure; -1: it has come.
int standin_fail_here(int code, int calls) {
  const int left = standin::here.fails_after;
  standin::here = {calls, code};
  return left;
}

// The device gets an error that stays when the stream comes to this point, like a failing kernel.
int standin_fail_on_stream(void* stream, int code) {
  return standin::enqueue(stream, [code] { standin::machine().sticky = code; }) == nullptr ? standin::kInvalidHandle : 0;
}

// Puts work of another library on the stream, such as the arithmetic of a kernel.
int standin_enqueue(void* stream, void (*work)(void*), void* argument) {
  return standin::enqueue(stream, [=] { work(argument); }) == nullptr ? standin::kInvalidHandle : 0;
}

// Whether the stream is captured. Work of another library is then kept, and run at each launch of the graph.
int standin_is_captured(void* stream) { return static_cast<int>(standin::capture_of(stream, nullptr) != 0); }

// Waits until the stream has come to this point. It is no synchronization of the program: `standin_host_waits` does not
// count it.
int standin_settle(void* stream) {
  if (const int code = standin::state_code()) return code;
  const standin::MarkPointer mark = standin::mark_of(stream);
  if (mark == nullptr) return standin::kInvalidHandle;
  mark->wait();
  return standin::state_code();
}

// A piece of work that takes `us` microseconds.
int standin_occupy(void* stream, long us) {
  const auto work = [us] {
    const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(us);
    while (std::chrono::steady_clock::now() < end && standin::machine().sticky == 0)
      std::this_thread::sleep_for(std::chrono::microseconds(100));
  };
  return standin::enqueue(stream, work) == nullptr ? standin::kInvalidHandle : 0;
}

// Says that a function has no stand-in, and returns `code`.
int standin_missing(const char* name, int code) {
  std::fprintf(stderr, "stand-in: %s is not implemented\n", name);
  return code;
}

// How often calls of this process, or of this thread, have stopped the host for work of a device.
long standin_host_waits() { return standin::host_waits; }
long standin_thread_waits() { return standin::own_host_waits; }

// After the next `allocations` allocations of device memory or pinned memory, `times` ones find no room.
void standin_fail_allocations(int allocations, int times) {
  standin::machine().allocations_failing = times;
  standin::machine().allocations_left = allocations;
}

// For a test that stands for a kernel or a debugger: the host's address of device memory.
void* standin_reached(void* address) { return standin::reached(address); }

void standin_memory_used(int device, size_t* bytes) { *bytes = standin::machine().device(device).memory.used(); }

#pragma GCC visibility pop
}
