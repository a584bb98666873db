// A group's blocking calls that have been made before, and the memory that operations in flight work on.
//
// Not thread-safe but for `next` and `last`: whoever holds Python's lock calls them.
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

// What tells two calls apart; the ranks agree on more (the plan), which follows from it.
struct CallShape {
  static constexpr int kMostDims = 4;
  uint32_t name = 0;
  char format = 0;  // of the buffer protocol, native byte order
  uint8_t op = 0;
  int8_t dims = 0;  // -1: no array
  std::array<int64_t, kMostDims> sizes{};
  bool operator==(const CallShape&) const = default;
};

class RepeatedCalls {
 public:
  // `pause_every`: operations, at each of which the caller has more to do; 0: never.
  RepeatedCalls(Context& context, uint64_t group, std::shared_ptr<SharedSlots> slots, uint64_t steps,
                uint64_t pause_every)
      : context_(context), group_(group), slots_(std::move(slots)), steps_(steps), pause_every_(pause_every) {}

  uint64_t next() { return sequence_.fetch_add(steps_) + steps_; }  // the group's next sequence number
  uint64_t last() const { return sequence_.load(); }
  std::shared_ptr<SharedSlots> slots() const { return slots_; }

  // From now on such a call runs as `spec`, under other sequence numbers.
  void remember(const CallShape& shape, const OperationSpec& spec);
  void forget() { known_.clear(); }

  // The call again, on `data`, as far as it goes at once. Neither done nor an operation: `model` is to be posted, as
  // `next_of` says; no model: such a call is not known, or it is time to pause.
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

// What operations in flight work on, as `Held` keeps it. It belongs to the process: whoever drops handle, array and
// group must not free memory that ranks still read and write.
template <typename Held>
class HeldMemory {
 public:
  explicit HeldMemory(Context& context) : context_(context) {}

  // Returns what is no longer needed: to be let go of when nothing here is at work, as that may run any code.
  [[nodiscard]] std::vector<Held> hold(const std::shared_ptr<Operation>& operation, Held memory) {
    std::vector<Held> dead;
    if (held_.size() >= sweep_at_) {
      for (auto at = held_.begin(); at != held_.end();) {
        const bool ended = context_.has_ended(*at->first);
        if (ended) dead.push_back(std::move(at->second));
        at = ended ? held_.erase(at) : std::next(at);
      }
      sweep_at_ = held_.size() < kFew ? 0 : 2 * held_.size();  // what many handles in flight cost stays linear
    }
    held_.insert_or_assign(operation, std::move(memory));
    return dead;
  }
  [[nodiscard]] Held release(const std::shared_ptr<Operation>& operation) {  // which has ended
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
