// An all_reduce by exchange of buffers that fit the group's slots: publish, combine everybody's. One step.
//
// Guarded by RankState::mutex; whichever thread drives or posts calls it.
#pragma once

#include "operation_record.h"

namespace multiring {

// Combines what all ranks have published for `sequence` into `target`.
void combine_published(const Program& program, const SharedSlots& slots, uint64_t sequence, std::byte* target,
                       size_t bytes);

class SlotExecution {
 public:
  explicit SlotExecution(OperationRecord& operation) : operation_(operation) {}

  void enter(bool is_published);  // `is_published`: what this rank shows is written already
  void leave();
  // Where all ranks are there and mean the same, does what there is to do.
  SharedSlots::Seen advance();
  void withdraw() { operation_.spec.slots->withdraw(operation_.key().sequence); }

 private:
  OperationRecord& operation_;
};

}  // namespace multiring
