// An all_reduce in the group's slots: each rank publishes its buffer and combines all buffers, in one step.
//
// RankState::mutex guards the state; the driving or posting thread calls it and holds the mutex.
#pragma once

#include "operation_record.h"

namespace multiring {

// Combines the payloads that all ranks have published for `sequence` into `target`.
void combine_published(const Program& program, const SharedSlots& slots, uint64_t sequence, std::byte* target,
                       size_t bytes);

class SlotExecution {
 public:
  explicit SlotExecution(OperationRecord& operation) : operation_(operation) {}

  void enter(bool is_published);  // starts to wait in the slots; publishes the contribution unless `is_published`
  void leave();                   // ends the wait
  // Combines the buffers if all ranks have published the same operation. Returns the state of the slots.
  SharedSlots::Seen advance();
  void withdraw() { operation_.spec.slots->withdraw(operation_.key().sequence); }

 private:
  OperationRecord& operation_;
};

}  // namespace multiring
