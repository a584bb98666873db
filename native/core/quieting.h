// Whom a failed operation waits for before its user has the memory back: peers that may still write into it.
//
// Guarded by RankState::mutex; whichever thread drives, hears frames, or fails the operation calls it.
#pragma once

#include <set>
#include <string>

#include "operation_record.h"

namespace multiring {

class Quieting {
 public:
  explicit Quieting(OperationRecord& operation) : operation_(operation) {}

  void begin();  // waits for the members that share memory with this rank, and for some seconds at most
  void on_quiet(int peer) { loud_.erase(peer); }  // it says that it writes no more, or has failed too
  bool waits_for_nobody() const { return loud_.empty(); }
  const std::set<int>& loud() const { return loud_; }  // who has yet to say so
  bool is_over();
  // Who was waited for in vain, if anybody, as a fault's text goes on; the buffer is nobody's then.
  std::string end();

 private:
  OperationRecord& operation_;
  std::set<int> loud_;
  Clock::time_point until_{};
};

}  // namespace multiring
