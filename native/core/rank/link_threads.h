// The threads that move the bytes of links with several connections.
//
// A rank has one such thread for each connection of a link: thread i serves connection i of all its links. The threads
// hold RankState::mutex except during system calls, so the copies between the kernel and the memory run concurrently.
// Reductions and all decisions still run one after another. With one connection there are no such threads, and the
// progress thread does the work.
#pragma once

#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "operation_driver.h"
#include "operation_table.h"
#include "peers.h"
#include "rank_state.h"
#include "sleepers.h"

namespace multiring {

class LinkThreads {
 public:
  LinkThreads(RankState& state, Sleepers& sleepers, Peers& peers, OperationTable& table, OperationDriver& driver)
      : state_(state), sleepers_(sleepers), peers_(peers), table_(table), driver_(driver) {}

  void start(uint16_t count);
  void join();    // call it after RankState::stopped is set, without the mutex
  void disown();  // a forked child has no such threads

 private:
  void run(uint16_t index);
  bool carry(uint16_t index);
  void tell_callers(uint64_t& told_of);

  RankState& state_;
  Sleepers& sleepers_;
  Peers& peers_;
  OperationTable& table_;
  OperationDriver& driver_;
  std::vector<std::unique_ptr<std::thread>> threads_;
};

}  // namespace multiring
