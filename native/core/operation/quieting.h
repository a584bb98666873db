// The wait of a failed operation for peers that may still write into the user's memory.
//
// RankState::mutex guards the state, and every caller holds the mutex: the driving thread, and callers that fail the
// operation.
#pragma once

#include <set>
#include <string>

#include "operation_record.h"

namespace multiring {

class Quieting {
 public:
  explicit Quieting(OperationRecord& operation) : operation_(operation) {}

  void begin();  // starts to wait for the members that share memory with this rank, for some seconds at most
  void on_quiet(int peer) { loud_.erase(peer); }  // the peer reports that it writes no more, or that it has failed too
  bool waits_for_nobody() const { return loud_.empty(); }
  const std::set<int>& loud() const { return loud_; }  // peers that may still write
  bool is_over();
  // Ends the wait. If some peers have not answered, it quarantines the buffer and returns a text for the error message
  // that names them; otherwise the text is empty.
  std::string end();

 private:
  OperationRecord& operation_;
  std::set<int> loud_;
  Clock::time_point until_{};
};

}  // namespace multiring
