#include "request_queue.h"

#include <unistd.h>

#include <array>
#include <cstring>
#include <utility>

#include "memory/fault.h"

namespace multiring {
namespace {

constexpr std::array<uint8_t, 15> kTypeBytes{1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8, 8, 16};

void require(bool holds, const std::string& text) {
  if (!holds) throw Fault(FaultKind::argument, "a request of native code: " + text);
}

template <typename T>
void append(std::string& text, const T& value) {
  text.append(reinterpret_cast<const char*>(&value), sizeof value);
}

}  // namespace

size_t size_of_type(int32_t type) {
  return type < 0 || static_cast<size_t>(type) >= kTypeBytes.size() ? 0 : kTypeBytes[static_cast<size_t>(type)];
}

Request::Request(const MultiringRequest& wanted, uint64_t number) : wanted_(wanted), number_(number) {
  const size_t each = size_of_type(wanted.type);
  const std::string type = std::to_string(wanted.type);
  require(wanted.collective >= MULTIRING_ALL_REDUCE && wanted.collective <= MULTIRING_BARRIER,
          "collective " + std::to_string(wanted.collective) + "; want a collective of multiring.h");
  require(each != 0, "type " + type + "; want a type of multiring.h");
  require(wanted.op >= MULTIRING_AVERAGE && wanted.op <= MULTIRING_PRODUCT,
          "op " + std::to_string(wanted.op) + "; want a reduction of multiring.h");
  require(wanted.count >= (wanted.collective == MULTIRING_BARRIER ? 0 : 1),
          std::to_string(wanted.count) + " arrays; want at least one");
  name_ = wanted.name == nullptr ? "" : wanted.name;
  wire_ = wanted.wire == nullptr ? "" : wanted.wire;
  if (wanted.has_splits != 0) splits_.assign(wanted.splits, wanted.splits + wanted.split_count);
  for (int32_t i = 0; i < wanted.count; ++i) {
    const MultiringArray& given = wanted.arrays[i];
    Array array{static_cast<const std::byte*>(given.input), static_cast<std::byte*>(given.output), {}, each};
    array.shape.assign(given.shape, given.shape + given.dims);
    for (const int64_t dim : array.shape) {
      require(dim >= 0, "an array with the dimension " + std::to_string(dim));
      array.bytes *= static_cast<size_t>(dim);
    }
    bytes_ += array.bytes;
    arrays_.push_back(std::move(array));
  }
  wanted_.arrays = nullptr;
  wanted_.splits = nullptr;
  wanted_.name = wanted_.wire = nullptr;
  for (const int32_t value : {wanted.process_set, wanted.collective, wanted.type, wanted.op, wanted.root, wanted.count,
                              wanted.wants_rows, wanted.has_splits}) {
    append(signature_, value);
  }
  append(signature_, wanted.prescale);
  append(signature_, wanted.postscale);
  for (const std::string* words : {&name_, &wire_}) {
    append(signature_, words->size());
    signature_ += *words;
  }
  for (const Array& array : arrays_) {
    append(signature_, array.shape.size());
    for (const int64_t dim : array.shape) append(signature_, dim);
  }
  for (const int64_t split : splits_) append(signature_, split);
}

void* Request::allocate(size_t array, const std::vector<int64_t>& shape) {
  void* found = wanted_.allocate == nullptr ? nullptr
                                            : wanted_.allocate(wanted_.data, static_cast<int32_t>(array), shape.data(),
                                                               static_cast<int32_t>(shape.size()));
  if (found == nullptr) {
    std::string dims;
    for (const int64_t dim : shape) dims += (dims.empty() ? "" : ", ") + std::to_string(dim);
    throw Fault(FaultKind::state, "the result of array " + std::to_string(array) + " has the shape (" + dims +
                                      "), but the caller provides no memory of this shape: want memory for the shape "
                                      "that follows from the arrays of all ranks");
  }
  return found;
}

std::byte* Request::output(size_t array, const std::vector<int64_t>& shape) {
  std::byte*& found = arrays_.at(array).output;
  if (found == nullptr) found = static_cast<std::byte*>(allocate(array, shape));
  return found;
}

void Request::pack(std::byte* memory) const {
  for (const Array& array : arrays_) {
    if (array.bytes != 0) std::memcpy(memory, array.input, array.bytes);
    memory += array.bytes;
  }
}

void Request::unpack(const std::byte* memory) {
  for (size_t i = 0; i < arrays_.size(); ++i) {
    std::byte* to = output(i, arrays_[i].shape);
    if (arrays_[i].bytes != 0) std::memcpy(to, memory, arrays_[i].bytes);
    memory += arrays_[i].bytes;
  }
}

RequestQueue::RequestQueue() : owner_(::getpid()) {
  entry_.version = MULTIRING_ENTRY_VERSION;
  entry_.size = sizeof entry_;
  entry_.self = this;
  entry_.start = [](void* self, const MultiringRequest* request) {
    return static_cast<RequestQueue*>(self)->start(*request);
  };
  entry_.cancel = [](void* self, uint64_t number) {
    return static_cast<int32_t>(static_cast<RequestQueue*>(self)->cancel(number));
  };
  entry_.cancel_all = [](void* self) { return static_cast<RequestQueue*>(self)->cancel_all(); };
}

uint64_t RequestQueue::start(const MultiringRequest& wanted) {
  if (wanted.size < sizeof(MultiringRequest) || wanted.done == nullptr) return 0;  // the failure cannot be reported
  if (::getpid() != owner_) {
    wanted.done(wanted.data, MULTIRING_STATE,
                "this process was forked from a rank and is not a rank itself: start it as a separate program");
    return 0;
  }
  if (is_closed_) {
    wanted.done(wanted.data, MULTIRING_STATE, "this process is ending: wait for all results before the program ends");
    return 0;
  }
  try {
    std::unique_lock lock(mutex_);
    const uint64_t number = ++last_;
    lock.unlock();
    auto request = std::make_shared<Request>(wanted, number);
    lock.lock();
    known_.emplace(number, request);
    waiting_.push_back(std::move(request));
    const bool may_go = !turn_is_taken_;
    lock.unlock();
    if (may_go) may_take_.notify_one();
    return number;
  } catch (const std::exception& error) {  // no memory, or an invalid request
    wanted.done(wanted.data, MULTIRING_ARGUMENT, error.what());
    return 0;
  }
}

bool RequestQueue::cancel(uint64_t number) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = known_.find(number);
    if (found == known_.end()) return false;
    if (found->second->is_cancelled.exchange(true)) return true;
    bool waits = false;
    for (const auto& request : waiting_) waits = waits || request == found->second;
    if (!waits) waiting_.push_front(found->second);
  }
  may_take_.notify_one();
  return true;
}

uint64_t RequestQueue::cancel_all() {
  std::vector<uint64_t> numbers;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [number, request] : known_) numbers.push_back(number);
  }
  uint64_t found = 0;
  for (const uint64_t number : numbers) found += cancel(number) ? 1 : 0;
  return found;
}

void RequestQueue::close() { is_closed_ = true; }

std::shared_ptr<Request> RequestQueue::take() {
  std::unique_lock lock(mutex_);
  ++idle_;
  may_take_.wait(lock, [this] { return !turn_is_taken_ && !waiting_.empty(); });
  --idle_;
  turn_is_taken_ = true;
  auto request = std::move(waiting_.front());
  waiting_.pop_front();
  return request;
}

bool RequestQueue::pass() {
  bool somebody_waits = false, has_work = false;
  {
    const std::lock_guard lock(mutex_);
    turn_is_taken_ = false;
    somebody_waits = idle_ != 0;
    has_work = !waiting_.empty();
  }
  if (has_work) may_take_.notify_one();
  return somebody_waits;
}

void RequestQueue::end(const Request& request, int32_t error, const std::string& text) {
  {
    const std::lock_guard lock(mutex_);
    if (known_.erase(request.number()) == 0) return;  // the request had already ended
  }
  request.end(error, text.c_str());
}

uint64_t RequestQueue::in_flight() {
  const std::lock_guard lock(mutex_);
  return known_.size();
}

}  // namespace multiring
