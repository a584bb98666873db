#include "device_arrays.h"

#include <dlfcn.h>

#include <bit>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>

#include "element_types.h"

namespace multiring::jax {

struct PinnedBlock {
  void* memory = nullptr;
  size_t size = 0;
};

namespace {

constexpr unsigned kPortable = 1;
constexpr size_t kSmallest = 4096;

// The functions of the driver that this file calls.
struct Driver {
  int (*cuStreamGetCtx)(void* stream, void** context);
  int (*cuCtxPushCurrent_v2)(void* context);
  int (*cuCtxPopCurrent_v2)(void** context);
  int (*cuMemHostAlloc)(void** memory, size_t bytes, unsigned flags);
  int (*cuMemcpyDtoHAsync_v2)(void* to, uint64_t from, size_t bytes, void* stream);
  int (*cuMemcpyHtoDAsync_v2)(uint64_t to, void* from, size_t bytes, void* stream);
  int (*cuStreamSynchronize)(void* stream);
  int (*cuStreamIsCapturing)(void* stream, int* status);
  std::string missing;  // empty if all functions are there
};

const Driver& driver() {
  static const Driver found = [] {
    Driver made{};
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      made.missing = "libcuda.so.1, which belongs to NVIDIA's driver";
      return made;
    }
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      if (function == nullptr) made.missing = std::string(name) + " of libcuda.so.1: the driver is too old";
    };
    find(made.cuStreamGetCtx, "cuStreamGetCtx");
    find(made.cuCtxPushCurrent_v2, "cuCtxPushCurrent_v2");
    find(made.cuCtxPopCurrent_v2, "cuCtxPopCurrent_v2");
    find(made.cuMemHostAlloc, "cuMemHostAlloc");
    find(made.cuMemcpyDtoHAsync_v2, "cuMemcpyDtoHAsync_v2");
    find(made.cuMemcpyHtoDAsync_v2, "cuMemcpyHtoDAsync_v2");
    find(made.cuStreamSynchronize, "cuStreamSynchronize");
    find(made.cuStreamIsCapturing, "cuStreamIsCapturing");
    return made;
  }();
  return found;
}

std::string failed(const char* what, int code, size_t bytes = 0) {
  return std::string(what) + ": error " + std::to_string(code) + " of CUDA" +
         (bytes == 0 ? "" : ", for " + std::to_string(bytes) + " bytes");
}

// Makes the stream's context current, because XLA need not have done so on this thread.
class InContext {
 public:
  explicit InContext(void* stream) {
    void* context = nullptr;
    code_ = driver().cuStreamGetCtx(stream, &context);
    if (code_ == 0) code_ = driver().cuCtxPushCurrent_v2(context);
  }
  ~InContext() {
    void* context = nullptr;
    if (code_ == 0) driver().cuCtxPopCurrent_v2(&context);
  }
  InContext(const InContext&) = delete;
  InContext& operator=(const InContext&) = delete;
  int code() const { return code_; }

 private:
  int code_ = 0;
};

// The blocks that no call uses, by stream and size. Pinned memory is expensive to allocate, so blocks are kept as long
// as the process lives.
class Pool {
 public:
  // Returns a free block, or null.
  PinnedBlock* find(void* stream, size_t size) {
    const std::lock_guard lock(mutex_);
    auto& free = free_[{stream, size}];
    if (free.empty()) return nullptr;
    PinnedBlock* found = free.back();
    free.pop_back();
    return found;
  }
  void give_back(void* stream, PinnedBlock* block) {
    const std::lock_guard lock(mutex_);
    free_[{stream, block->size}].push_back(block);
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<void*, size_t>, std::vector<PinnedBlock*>> free_;
};

Pool& pool() {
  static Pool& only = *new Pool;  // never destroyed: a program may run while the process ends
  return only;
}

// Returns the bytes of an array, or 0 for a type that multiring does not have.
size_t bytes_of(const Buffer& array) {
  const int32_t type = element_type(array.dtype);
  size_t bytes = type < 0 ? 0 : kElementTypes[static_cast<size_t>(type)].bytes;
  for (int64_t dim = 0; dim < array.rank; ++dim) bytes *= static_cast<size_t>(array.dims[dim]);
  return bytes;
}

}  // namespace

std::string DeviceArrays::take(size_t bytes, PinnedBlock*& block) {
  const size_t size = std::bit_ceil(bytes < kSmallest ? kSmallest : bytes);
  block = pool().find(stream_, size);
  if (block == nullptr) {
    auto made = std::make_unique<PinnedBlock>();
    made->size = size;
    if (const int code = driver().cuMemHostAlloc(&made->memory, size, kPortable); code != 0)
      return failed("no pinned host memory", code, size);
    block = made.release();
  }
  blocks_.push_back(block);
  return "";
}

std::string DeviceArrays::begin(std::vector<Buffer>& inputs, std::vector<Buffer>& results) {
  if (!driver().missing.empty()) return "this host has no " + driver().missing;
  const InContext context(stream_);
  if (context.code() != 0) return failed("the stream has no context", context.code());
  int capturing = 0;
  if (const int code = driver().cuStreamIsCapturing(stream_, &capturing); code != 0)
    return failed("the stream cannot be used", code);
  if (capturing != 0) return "XLA captures a CUDA graph, which cannot hold a collective";
  if (std::string why = copy_inputs(inputs); !why.empty()) return why;
  for (Buffer& result : results) {
    const size_t bytes = bytes_of(result);
    if (bytes == 0) continue;
    PinnedBlock* block = nullptr;
    if (std::string why = take(bytes, block); !why.empty()) return why;
    results_.push_back({result.data, block, bytes});
    result.data = block->memory;
  }
  const int code = driver().cuStreamSynchronize(stream_);
  return code == 0 ? "" : failed("the program's work before the collective", code);
}

std::string DeviceArrays::copy_inputs(std::vector<Buffer>& inputs) {
  for (Buffer& input : inputs) {
    const size_t bytes = bytes_of(input);
    if (bytes == 0) continue;
    PinnedBlock* block = nullptr;
    if (std::string why = take(bytes, block); !why.empty()) return why;
    const auto from = reinterpret_cast<uint64_t>(input.data);
    if (const int code = driver().cuMemcpyDtoHAsync_v2(block->memory, from, bytes, stream_); code != 0)
      return failed("a copy to the host", code, bytes);
    input.data = block->memory;
  }
  return "";
}

std::string DeviceArrays::finish() {
  const InContext context(stream_);
  if (context.code() != 0) return failed("the stream has no context", context.code());
  for (const Result& each : results_) {
    const auto to = reinterpret_cast<uint64_t>(each.device);
    if (const int code = driver().cuMemcpyHtoDAsync_v2(to, each.block->memory, each.bytes, stream_); code != 0)
      return failed("a copy to the device", code, each.bytes);
  }
  return "";
}

DeviceArrays::~DeviceArrays() {
  for (PinnedBlock* block : blocks_) pool().give_back(stream_, block);
}

}  // namespace multiring::jax
