// A direct all_reduce on shared buffers: each rank combines its slice of all buffers and writes the result into all.
//
// A small buffer in ordinary memory is copied into the segment, and the result is copied back. RankState::mutex guards
// the state; the driving thread calls it. Other ranks of the host may write into this rank's buffer from the first
// round on.
#pragma once

#include <vector>

#include "agreement.h"
#include "operation_record.h"

namespace multiring {

enum class SliceOutcome : uint8_t { waits, moved, done };

class SliceExecution {
 public:
  SliceExecution(OperationRecord& operation, Agreement& agreement) : operation_(operation), agreement_(agreement) {}

  void stage();    // copies a small buffer from ordinary memory into the segment, so that peers can access it
  void unstage();  // releases the copy
  const std::byte* shared() const { return staged_ != nullptr ? staged_ : operation_.spec.bases[1]; }
  bool is_staged() const { return staged_ != nullptr; }
  void quarantine_staged() { operation_.host.segment().quarantine(staged_); }  // peers may still write into the copy

  bool choose();  // true if all ranks run slices; every rank decides from the same notes, so the answers are equal
  bool is_offered() const;  // true if this rank's notes permit other ranks to write into its buffer
  // Combines slices, for a bounded number of bytes; done once the slices of this rank are complete.
  SliceOutcome advance();
  SliceOutcome pass_barrier();  // done once no rank uses this rank's buffer any more
  int awaited() const { return (*operation_.spec.rounds)[barrier_].from; }  // the rank that the barrier waits for
  bool is_past_barrier() const { return barrier_ == operation_.spec.rounds->size(); }
  const std::vector<int>& peers() const { return slices_.front()->peers; }  // the same ranks for all slices

 private:
  bool is_wanted() const;
  bool combine_slice(const Move& slice, uint64_t& budget);
  void say_completed();
  void copy_but_slice(std::byte* to, const std::byte* from) const;

  OperationRecord& operation_;
  Agreement& agreement_;
  std::byte* staged_ = nullptr;      // the copy of this rank's buffer in the segment, if any
  std::vector<std::byte*> reached_;  // the buffers of all ranks, in the order of summation
  std::vector<const void*> sources_;
  std::vector<const Move*> slices_;  // this rank's slices, as reductions of the program
  size_t slice_ = 0;                 // index of the current slice
  uint64_t progress_ = 0;            // completed bytes of the current slice
  size_t barrier_ = 0;               // completed rounds of the completion barrier
};

}  // namespace multiring
