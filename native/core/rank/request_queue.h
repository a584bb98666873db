// The queue of requests from native code (entry/multiring.h).
//
// Serving threads take turns, so requests are submitted in the order of their arrival. The thread with the turn takes a
// request, submits it and passes the turn on. Then it waits for the operation while another thread takes the next
// request.
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

// A request with copies of everything but the arrays' memory. Its `done` callback is called exactly once.
class Request {
 public:
  struct Array {
    const std::byte* input = nullptr;
    std::byte* output = nullptr;
    std::vector<int64_t> shape;
    size_t bytes = 0;
  };

  Request(const MultiringRequest& wanted, uint64_t number);  // throws Fault::argument for an invalid request

  uint64_t number() const { return number_; }
  const MultiringRequest& wanted() const { return wanted_; }  // its pointers to arrays, splits and strings are null
  const std::vector<Array>& arrays() const { return arrays_; }
  const std::vector<int64_t>& splits() const { return splits_; }
  const std::string& name() const { return name_; }
  const std::string& wire() const { return wire_; }
  // Returns a key that is equal for requests that differ only in the memory of their arrays.
  const std::string& signature() const { return signature_; }
  size_t bytes() const { return bytes_; }

  // Returns the output memory of an array. The first call allocates it if the caller gave none. Throws Fault::state if
  // there is no memory.
  std::byte* output(size_t array, const std::vector<int64_t>& shape);
  void* allocate(size_t array, const std::vector<int64_t>& shape);
  void pack(std::byte* memory) const;    // copies the inputs to `memory`, one after another
  void unpack(const std::byte* memory);  // copies packed results from `memory` to the outputs
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

size_t size_of_type(int32_t type);  // bytes of an element; 0 for an unknown type

// Thread-safe: one mutex guards the queue. Callbacks run without the mutex.
class RequestQueue {
 public:
  RequestQueue();
  RequestQueue(const RequestQueue&) = delete;
  RequestQueue& operator=(const RequestQueue&) = delete;

  MultiringEntry* entry() { return &entry_; }

  // See MultiringEntry.
  uint64_t start(const MultiringRequest& wanted);
  bool cancel(uint64_t number);
  uint64_t cancel_all();
  void close();  // makes later requests fail at once, because the serving threads end with the interpreter

  // For serving threads. Waits for the next request and returns it together with the turn. A request that is cancelled
  // after a thread took it is returned a second time.
  std::shared_ptr<Request> take();
  bool pass();  // passes the turn on; false if no thread waits for it
  // Calls the request's `done` callback, unless the request has already ended.
  void end(const Request& request, int32_t error, const std::string& text);
  uint64_t in_flight();

 private:
  MultiringEntry entry_{};
  const int32_t owner_;  // process id; a forked child has no serving threads
  std::mutex mutex_;
  std::condition_variable may_take_;
  std::deque<std::shared_ptr<Request>> waiting_;
  std::unordered_map<uint64_t, std::shared_ptr<Request>> known_;  // requests that have not ended, by number
  uint64_t last_ = 0;
  uint32_t idle_ = 0;
  bool turn_is_taken_ = false;
  std::atomic<bool> is_closed_{false};
};

}  // namespace multiring
