// The handler of multiring's custom calls in JAX programs. It uses the C interface of entry/multiring.h.
//
// A call has any number of arrays; the arrays of one element type form one request. XLA runs one custom call at a time,
// in the order of the compiled program. The handler waits for its requests; it blocks no Python thread. Arrays on a CUDA
// device are copied to the host before the requests, and the results back after them, on the stream of the program.

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "device_arrays.h"
#include "element_types.h"
#include "entry/call.h"
#include "ffi.h"

namespace multiring::jax {
namespace {

std::atomic<MultiringEntry*> entry{nullptr};

// XLA's error codes for multiring's errors, in the order of multiring.h.
constexpr std::array<int, 9> kCodes{0, 3, 9, 10, 4, 9, 12, 1, 13};
constexpr int kInternal = 13, kInvalidArgument = 3, kFailedPrecondition = 9, kUnimplemented = 12;

// The common result of the requests of one call.
class Ending {
 public:
  void expect() {
    const std::lock_guard lock(mutex_);
    ++left_;
  }
  void come(int32_t error, const char* text) {
    const std::lock_guard lock(mutex_);
    if (error != MULTIRING_OK && error_ == MULTIRING_OK) {
      error_ = error;
      text_ = text;
    }
    if (--left_ == 0) changed_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return left_ == 0; });
  }
  int32_t error() const { return error_; }
  const std::string& text() const { return text_; }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int left_ = 0;
  int32_t error_ = MULTIRING_OK;
  std::string text_;
};

// Calls without a name share one name. A rank runs only one of them at a time per process set, so the name is
// unambiguous and later requests can use the cached plan.
constexpr const char* kUnnamed = "jax";
std::unique_lock<std::mutex> turn_of(int32_t process_set) {
  static std::mutex guard;
  static std::map<int32_t, std::mutex> turns;  // a map, because its elements never move
  std::unique_lock lock(guard);
  std::mutex& turn = turns[process_set];
  lock.unlock();
  return std::unique_lock(turn);
}

// The arrays of one element type in a call.
struct Part {
  int32_t type = 0;
  std::vector<MultiringArray> arrays;
  std::vector<const Buffer*> results;
  Ending* ending = nullptr;

  // Returns the memory of a result, or null for another shape. JAX fixes the shapes of results before the call.
  void* room(int32_t array, const int64_t* shape, int32_t dims) const {
    const Buffer& result = *results[static_cast<size_t>(array)];
    bool fits = result.rank == dims;
    for (int32_t i = 0; fits && i < dims; ++i) fits = result.dims[i] == shape[i];
    static char nothing = 0;
    return !fits ? nullptr : result.data != nullptr ? result.data : &nothing;
  }

  // Starts a request whose end counts for the call.
  void start(MultiringEntry& to, MultiringRequest& request) {
    request.done = [](void* data, int32_t error, const char* why) {
      static_cast<Part*>(data)->ending->come(error, why);
    };
    request.data = this;
    ending->expect();
    to.start(to.self, &request);
  }
};

std::string numbered(const std::string& name, size_t at, size_t count) {
  return name + "_" + std::to_string(at + 1) + "of" + std::to_string(count);
}

// Fails a part's operations on the other ranks, because this rank cannot take part. Otherwise they would wait, and take
// this rank's next call of the same name for this one.
void decline(MultiringEntry& to, const CallText& call, Part& part, const std::string& why) {
  const size_t arrays = part.arrays.size(), operations = call.is_whole() ? 1 : arrays;
  for (size_t at = 0; at < operations; ++at) {
    CallText told = call;
    told.collective = MULTIRING_BARRIER;
    told.root = call.collective;
    told.wire = why;
    if (operations > 1) told.name = numbered(call.name, at, operations);
    MultiringRequest request = told.request();
    request.type = std::max(part.type, 0);  // of an unsupported type, only this rank's error knows the number
    request.arrays = part.arrays.data();
    request.count = static_cast<int32_t>(arrays / operations);
    part.start(to, request);
  }
}

Error* refused(const CallFrame* frame, int code, const std::string& text) {
  ErrorCreateArgs made{sizeof made, nullptr, text.c_str(), code};
  return frame->api->XLA_FFI_Error_Create(&made);
}

// Returns the stream of a program on a device.
Error* stream_of(const CallFrame* frame, void*& stream) {
  StreamGetArgs asked{sizeof asked, nullptr, frame->ctx, nullptr};
  Error* error = frame->api->XLA_FFI_Stream_Get(&asked);
  stream = asked.stream;
  return error;
}

std::string text_of(const CallFrame* frame, Error* error) {
  ErrorTextArgs asked{sizeof asked, nullptr, error, nullptr};
  frame->api->XLA_FFI_Error_GetMessage(&asked);
  return asked.message == nullptr ? "no reason given" : asked.message;
}

std::vector<Buffer> arrays_of(const Buffers& buffers) {
  std::vector<Buffer> found;
  for (int64_t each = 0; each < buffers.size - 1; ++each)  // the last one is a token
    found.push_back(*static_cast<const Buffer*>(buffers.args[each]));
  return found;
}

Error* execute(const CallFrame* frame, bool on_device) {
  const auto* span = static_cast<const ByteSpan*>(frame->attrs.attrs[0]);
  const std::string text(span->ptr, span->len);
  CallText call;
  MultiringEntry* to = entry.load();
  if (!call.parse(text))
    return refused(frame, kInvalidArgument, "call \"" + text + "\": want a call text made by multiring.jax");
  if (to == nullptr)
    return refused(frame, kFailedPrecondition,
                   "multiring is not loaded in this process: import multiring.jax before running this program");
  std::vector<Part> parts;
  // The last input and the last result are tokens that order the program's calls. The arrays precede them. Nobody reads
  // a token's value.
  std::vector<Buffer> inputs, results;  // of a program on a device: the host's copies
  std::optional<DeviceArrays> device;
  std::string refusal;          // why this rank cannot take part
  int code = kInternal;         // of the refusal
  Error* streamless = nullptr;  // XLA's error in place of a stream
  if (on_device) {
    inputs = arrays_of(frame->args);
    results = arrays_of(frame->rets);
    void* stream = nullptr;
    streamless = stream_of(frame, stream);
    if (streamless == nullptr) {
      device.emplace(stream);
      refusal = device->begin(inputs, results);
    } else {
      refusal = "XLA has no stream for a collective: " + text_of(frame, streamless);
    }
  }
  const auto count = static_cast<size_t>(frame->rets.size - 1);
  for (size_t i = 0; i < count; ++i) {
    const Buffer* input = on_device ? &inputs[i] : static_cast<const Buffer*>(frame->args.args[i]);
    const Buffer* result = on_device ? &results[i] : static_cast<const Buffer*>(frame->rets.args[i]);
    const int32_t type = element_type(input->dtype);
    if (type < 0 && refusal.empty()) {
      refusal = "multiring does not support arrays of XLA's type " + std::to_string(input->dtype);
      code = kUnimplemented;
    }
    size_t at = 0;
    while (at < parts.size() && parts[at].type != type) ++at;
    if (at == parts.size()) parts.emplace_back().type = type;
    parts[at].arrays.push_back(
        {input->data, call.is_whole() ? result->data : nullptr, input->dims, static_cast<int32_t>(input->rank)});
    parts[at].results.push_back(result);
  }
  Ending ending;
  const auto turn = call.name.empty() ? turn_of(call.process_set) : std::unique_lock<std::mutex>();
  const std::string name = call.name.empty() ? kUnnamed : call.name;
  call.name = name;
  for (size_t at = 0; at < parts.size(); ++at) {
    Part& part = parts[at];
    part.ending = &ending;
    if (parts.size() > 1) call.name = numbered(name, at, parts.size());
    if (!refusal.empty()) {
      decline(*to, call, part, refusal);
      continue;
    }
    MultiringRequest request = call.request();
    request.type = part.type;
    request.arrays = part.arrays.data();
    request.count = static_cast<int32_t>(part.arrays.size());
    request.allocate = [](void* data, int32_t array, const int64_t* shape, int32_t dims) {
      return static_cast<Part*>(data)->room(array, shape, dims);
    };
    part.start(*to, request);
  }
  ending.wait();
  if (streamless != nullptr) return streamless;
  if (!refusal.empty()) return refused(frame, code, refusal);
  if (ending.error() == MULTIRING_OK) {
    const std::string why = device ? device->finish() : "";
    return why.empty() ? nullptr : refused(frame, kInternal, why);
  }
  const auto kind = static_cast<size_t>(ending.error());
  return refused(frame, kCodes[kind < kCodes.size() ? kind : kCodes.size() - 1], ending.text());
}

Error* handle(CallFrame* frame, bool on_device) {
  const auto* extension = frame->extension_start;
  if (extension != nullptr && extension->type == kMetadataExtension) {
    auto* metadata = reinterpret_cast<MetadataExtension*>(frame->extension_start)->metadata;
    metadata->api_version.major_version = frame->api->api_version.major_version;
    metadata->api_version.minor_version = frame->api->api_version.minor_version;
    metadata->traits = 0;  // so XLA does not put calls into CUDA graphs
    return nullptr;
  }
  return frame->stage == kExecute ? execute(frame, on_device) : nullptr;
}

}  // namespace
}  // namespace multiring::jax

extern "C" {

// The functions that JAX registers, of the type XLA_FFI_Handler: for programs on CPUs, and on CUDA devices.
__attribute__((visibility("default"))) multiring::jax::Error* multiring_jax_handler(multiring::jax::CallFrame* frame) {
  return multiring::jax::handle(frame, false);
}
__attribute__((visibility("default"))) multiring::jax::Error* multiring_jax_cuda_handler(
    multiring::jax::CallFrame* frame) {
  return multiring::jax::handle(frame, true);
}

// Makes the handler submit its requests to `entry`. Returns an empty text, or the reason why that is impossible.
__attribute__((visibility("default"))) const char* multiring_jax_use(MultiringEntry* entry) {
  if (entry->version != MULTIRING_ENTRY_VERSION) return "this library and multiring's core have different versions";
  multiring::jax::entry = entry;
  return "";
}

}  // extern "C"
