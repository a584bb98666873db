// A direct all_reduce whose buffers others can reach: each rank combines its slice of all buffers, and writes into all.
//
// Ordinary memory that is small is copied into the segment for it, and back. Guarded by RankState::mutex; whichever
// thread drives calls it, and other ranks of the host write into this one's buffer from the first round on.
#pragma once

#include <vector>

#include "agreement.h"
#include "operation_record.h"

namespace multiring {

class SliceExecution {
 public:
  SliceExecution(OperationRecord& operation, Agreement& agreement) : operation_(operation), agreement_(agreement) {}

  void stage();    // a copy of a buffer that nobody could reach, where that pays
  void unstage();
  const std::byte* shared() const { return staged_ != nullptr ? staged_ : operation_.spec.bases[1]; }
  bool is_staged() const { return staged_ != nullptr; }
  void quarantine_staged() { operation_.host.segment().quarantine(staged_); }  // others may still write there

  bool choose();         // whether all ranks run it: they have all heard the same of each other
  bool is_offered() const;  // whether others may write into the buffer, once they have all heard of each other
  enum class Outcome : uint8_t { waits, moved, done };
  Outcome advance();
  Outcome pass_barrier();  // done once everybody is done with this rank's buffer
  int awaited() const { return (*operation_.spec.rounds)[barrier_].from; }  // in the barrier
  bool is_past_barrier() const { return barrier_ == operation_.spec.rounds->size(); }
  const std::vector<int>& peers() const { return slices_.front()->peers; }  // of all slices

 private:
  bool is_wanted() const;
  bool combine_slice(const Move& slice, uint64_t& budget);
  void say_completed();
  void copy_but_slice(std::byte* to, const std::byte* from) const;

  OperationRecord& operation_;
  Agreement& agreement_;
  std::byte* staged_ = nullptr;      // the copy of this rank's buffer that the others work on
  std::vector<std::byte*> reached_;  // everybody's buffer, in the order of summation
  std::vector<const void*> sources_;
  std::vector<const Move*> slices_;  // the reductions, which say what this rank's are
  size_t slice_ = 0;                 // the one at work
  uint64_t progress_ = 0;            // bytes of it
  size_t barrier_ = 0;               // rounds of the completion barrier that have come
};

}  // namespace multiring
