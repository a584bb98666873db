// A group's cached blocking calls, and the memory that operations in flight use.
//
// Only `next` and `last` are thread-safe. Callers of the other functions must hold Python's lock.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "context.h"

namespace multiring {

// The key of a cached call. The ranks agree on more (the plan), but the rest follows from this key.
struct CallShape {
  static constexpr int kMostDims = 4;
  uint32_t name = 0;
  char format = 0;  // element format of the buffer protocol, in native byte order
  uint8_t op = 0;
  int8_t dims = 0;  // -1: no array
  std::array<int64_t, kMostDims> sizes{};
  bool operator==(const CallShape&) const = default;
};

class RepeatedCalls {
 public:
  // `pause_every`: at each multiple of this many operations `attempt` returns no model, because the caller has periodic
  // work; 0: never.
  RepeatedCalls(Context& context, uint64_t group, std::shared_ptr<SharedSlots> slots, uint64_t steps,
                uint64_t pause_every)
      : context_(context), group_(group), slots_(std::move(slots)), steps_(steps), pause_every_(pause_every) {}

  uint64_t next() { return sequence_.fetch_add(steps_) + steps_; }  // the group's next sequence number
  uint64_t last() const { return sequence_.load(); }
  std::shared_ptr<SharedSlots> slots() const { return slots_; }

  // Caches `spec` for later calls of this shape. Each of them gets its own sequence number.
  void remember(const CallShape& shape, const OperationSpec& spec);
  void forget() { known_.clear(); }

  // Repeats a cached call on `data`. There are four results: the call is done; `operation` is in flight; only `model`
  // is set, and the caller must post `next_of(*model)`; or nothing is set, because the shape is unknown or a pause is
  // due.
  struct Attempt {
    bool is_done = false;
    std::shared_ptr<Operation> operation{};
    const OperationSpec* model = nullptr;
  };
  Attempt attempt(const CallShape& shape, std::byte* data);
  OperationSpec next_of(const OperationSpec& model);
  OperationSpec next_of(const OperationSpec& model, std::byte* data);

 private:
  static constexpr size_t kMostKept = 256;
  const OperationSpec* find(const CallShape& shape) const;

  Context& context_;
  const uint64_t group_;
  const std::shared_ptr<SharedSlots> slots_;
  const uint64_t steps_;
  const uint64_t pause_every_;
  std::atomic<uint64_t> sequence_{0};
  std::vector<std::pair<CallShape, OperationSpec>> known_;  // newest last
};

// Keeps the memory of operations in flight alive; `Held` is a reference to it. It belongs to the process, so that a
// program which drops handle, array and group does not free memory that ranks still read and write.
template <typename Held>
class HeldMemory {
 public:
  explicit HeldMemory(Context& context) : context_(context) {}

  // Holds `memory` until the operation has ended. Returns references that are no longer needed. The caller must destroy
  // them outside this object's functions, because their destructors may run arbitrary code.
  [[nodiscard]] std::vector<Held> hold(const std::shared_ptr<Operation>& operation, Held memory) {
    std::vector<Held> dead;
    if (held_.size() >= sweep_at_) {
      for (auto at = held_.begin(); at != held_.end();) {
        const bool ended = context_.has_ended(*at->first);
        if (ended) dead.push_back(std::move(at->second));
        at = ended ? held_.erase(at) : std::next(at);
      }
      sweep_at_ = held_.size() < kFew ? 0 : 2 * held_.size();  // keeps the total cost of many handles linear
    }
    held_.insert_or_assign(operation, std::move(memory));
    return dead;
  }
  // Returns the memory held for an operation that has ended.
  [[nodiscard]] Held release(const std::shared_ptr<Operation>& operation) {
    const auto found = held_.find(operation);
    if (found == held_.end()) return {};
    Held dead = std::move(found->second);
    held_.erase(found);
    return dead;
  }

 private:
  static constexpr size_t kFew = 8;
  Context& context_;
  std::map<std::shared_ptr<Operation>, Held> held_;
  size_t sweep_at_ = 0;
};

}  // namespace multiring
