// What the stand-ins of the CUDA runtime and of the driver have in common. All functions return an error code.
#pragma once

#include <cstddef>
#include <cstdint>

#include "capture.h"
#include "codes.h"
#include "stream.h"

namespace standin {

constexpr int kMajor = 9;  // an H100's
constexpr int kProcessors = 132;
constexpr int kWarp = 32;
constexpr int kThreadsPerBlock = 1024;

// Returns the error with which every call of this thread fails now: after a fork, in a host function, or after an error
// that stays.
int state_code();

int device_count();
int attribute_of(int attribute, int device, int* found);  // the runtime and the driver number them alike
int current_device();
int select_device(int device);  // makes the device's context that of the thread

// The driver's functions need cuInit, and a context of the thread. The runtime's calls see to both.
bool is_driver_initialized();
void initialize_driver();
bool has_context();
void drop_context();

int allocate(void** made, size_t bytes);
int release(void* address);
int release_on_stream(void* address, void* stream);  // when the stream comes to it
int memory_left(size_t* free_bytes, size_t* all_bytes);
int allocate_pinned(void** made, size_t bytes);
int release_pinned(void* address);
int register_host(void* address, size_t bytes, unsigned flags);
int unregister_host(void* address);

enum class MemoryKind { pageable = 0, pinned = 1, device = 2 };
struct Place {
  MemoryKind kind;
  int device;
};
Place place_of(const void* address);
void* reached(const void* address);  // the address at which streams find the memory

// A block of device memory for another process.
struct MemoryHandle {
  int process;
  int file;
  size_t all;  // bytes of the device
  size_t offset;
  size_t bytes;
};
int make_handle(MemoryHandle* handle, const void* address);
int open_handle(void** made, const MemoryHandle& handle);
int close_handle(const void* address);
int check_for_handle(void* event);  // whether an event may have a handle

// Copies on a stream. `kind` is the runtime's; 4 goes by the addresses. `waits`: the call ends after the copy.
int copy(void* to, const void* from, size_t bytes, int kind, void* stream, bool waits);
int fill(void* to, int value, size_t bytes, void* stream, bool waits);

int make_stream(void** made, unsigned flags, int priority);
int destroy_stream(void* stream);
int priority_of(void* stream, int* priority);
int query_stream(void* stream);
int wait_for_stream(void* stream);
int have_stream_wait(void* stream, void* event);
int call_on_stream(void* stream, void (*function)(void*), void* argument);
int wait_for_value(void* stream, void* address, unsigned value, unsigned condition);  // of 32 bits
int write_value(void* stream, void* address, unsigned value);
int wait_for_device();

int make_event(void** made, unsigned flags);
int destroy_event(void* event);
int record_event(void* event, void* stream);
int query_event(void* event);
int wait_for_event(void* event);
int elapsed_ms(float* ms, void* first, void* last);

int begin_capture(void* stream, int mode);
int end_capture(void* stream, Graph** made);
int capture_of(void* stream, uint64_t* id);  // returns the status: 0 none, 1 active, 2 spoiled
int launch(const Graph& graph, void* stream);

// For libnccl's stand-in: adds what makes the work to the stream's capture; returns false if there is none.
bool enqueue_made(void* stream, const WorkMaker& maker);
// For libnccl's stand-in: puts work on a stream; returns null if the stream is not valid. The work does not run after an
// error that stays.
MarkPointer enqueue(void* stream, Work work);
MarkPointer mark_of(void* stream);  // of the stream's work so far; null if the stream is not valid
int device_of_stream(void* stream);  // -1 if it is not valid

const char* name_of(int code);
const char* text_of(int code);

}  // namespace standin
