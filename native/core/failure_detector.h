// Which ranks die, leave or fall silent, as this rank finds it or is told.
//
// What is found here, while links or operations are at work, becomes a loss (Peers::lose) only when those operations
// are settled: OperationFailures::settle_losses. Guarded by RankState::mutex, which every caller holds: the progress
// thread hears of ends over watched sockets, whichever thread drives hears frames.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "clock.h"
#include "descriptor.h"
#include "peers.h"
#include "rank_state.h"

namespace multiring {

// What some member could not finish an operation for; `quiet_s` where that one is silent.
struct FailureCause {
  int rank;
  LossKind kind;
  int64_t quiet_s;
};

struct NewLoss {
  int rank;
  Loss loss;
  Clock::time_point found;
  bool is_passed_on = true;
};

class FailureDetector {
 public:
  FailureDetector(RankState& state, Peers& peers) : state_(state), peers_(peers) {}

  void watch(int peer, Descriptor socket);  // whose end tells of the rank's death
  void say_leaving();                       // over those
  void drop_watches() { watches_.clear(); }

  void on_loss(int peer, LossKind kind, const std::string& why);  // as a link found
  void note_loss(int lost, LossKind kind, const std::string& why);
  void on_lost(int peer, const Frame& frame);  // what `peer` tells of another's loss, or of this rank's own
  // `peer` failed an operation for this rank's being cut off, or for another's loss.
  void on_exclusion(int peer);
  void on_cause(int peer, const FailureCause& cause);
  void believe_gossip(Clock::time_point now);

  bool has_new() const { return !new_losses_.empty(); }
  bool waits_for_time() const { return !gossip_.empty() || has_new(); }
  // How many of the new losses are to be settled now. Only once nothing moves any more is it sure that a lost rank's
  // last words have been heard; but operations of others may keep moving for ever.
  size_t heard_out(bool anything_moves) const;
  std::vector<NewLoss> take(size_t count);

 private:
  struct Gossip {
    Clock::time_point believed_at;
    std::string why;
  };
  void on_watch_ready(int peer);

  RankState& state_;
  Peers& peers_;
  std::map<int, Descriptor> watches_;  // by rank
  std::map<int, Gossip> gossip_;       // of ranks that left, as others say
  std::vector<NewLoss> new_losses_;    // in order
};

}  // namespace multiring
