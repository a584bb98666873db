// Requests of native code (entry/multiring.h), until the job serves them.
//
// Threads that serve take turns: one takes a request, submits it and passes the turn on, so that requests are
// submitted in the order in which they came; then it waits for the operation while another takes the next one.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "entry/multiring.h"

namespace multiring {

// A request with copies of what its caller need not keep. `done` is called once, by whoever ends it first.
class Request {
 public:
  struct Array {
    const std::byte* input = nullptr;
    std::byte* output = nullptr;
    std::vector<int64_t> shape;
    size_t bytes = 0;
  };

  Request(const MultiringRequest& wanted, uint64_t number);  // Fault: it makes no sense

  uint64_t number() const { return number_; }
  const MultiringRequest& wanted() const { return wanted_; }  // without its pointers to arrays, splits and words
  const std::vector<Array>& arrays() const { return arrays_; }
  const std::vector<int64_t>& splits() const { return splits_; }
  const std::string& name() const { return name_; }
  const std::string& wire() const { return wire_; }
  // All that makes two requests alike but arrays' memory.
  const std::string& signature() const { return signature_; }
  size_t bytes() const { return bytes_; }

  std::byte* output(size_t array, const std::vector<int64_t>& shape);  // Fault: there is no memory
  void* allocate(size_t array, const std::vector<int64_t>& shape);
  void pack(std::byte* memory) const;           // the inputs, one behind the other
  void unpack(const std::byte* memory);         // to the outputs
  void end(int32_t error, const char* text) const { wanted_.done(wanted_.data, error, text); }

  std::atomic<bool> is_cancelled{false};

 private:
  MultiringRequest wanted_;
  const uint64_t number_;
  std::string name_, wire_, signature_;
  std::vector<Array> arrays_;
  std::vector<int64_t> splits_;
  size_t bytes_ = 0;
};

size_t size_of_type(int32_t type);  // bytes; 0: there is no such type

// Guarded by one mutex, that no callback is called under.
class RequestQueue {
 public:
  RequestQueue();
  RequestQueue(const RequestQueue&) = delete;
  RequestQueue& operator=(const RequestQueue&) = delete;

  MultiringEntry* entry() { return &entry_; }

  uint64_t start(const MultiringRequest& wanted);
  bool cancel(uint64_t number);
  uint64_t cancel_all();
  void close();  // whatever comes from now on fails at once: the threads that serve end with the interpreter

  // For threads that serve: the next request, and the turn with it. One that was cancelled after it was taken comes
  // once more.
  std::shared_ptr<Request> take();
  bool pass();  // the turn on; false: no thread waits for it
  void end(const Request& request, int32_t error, const std::string& text);
  uint64_t in_flight();

 private:
  MultiringEntry entry_{};
  const int32_t owner_;  // process; a fork has no threads that serve
  std::mutex mutex_;
  std::condition_variable may_take_;
  std::deque<std::shared_ptr<Request>> waiting_;
  std::unordered_map<uint64_t, std::shared_ptr<Request>> known_;  // that have not ended
  uint64_t last_ = 0;
  uint32_t idle_ = 0;
  bool turn_is_taken_ = false;
  std::atomic<bool> is_closed_{false};
};

}  // namespace multiring
