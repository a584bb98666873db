// Detects ranks that die, leave or fall silent, from this rank's own connections and from reports of other ranks.
//
// A detected loss is queued here. It takes effect (Peers::lose) only in OperationFailures::settle_losses, after links
// and operations have finished their current work. RankState::mutex guards the state, and every caller holds it. The
// progress thread reads the watched sockets; the driving thread handles frames.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "memory/clock.h"
#include "memory/descriptor.h"
#include "peers.h"
#include "rank_state.h"

namespace multiring {

// The reason why a member could not finish an operation: rank `rank` was lost, could not continue, aborted, or has been
// silent for `quiet_s` seconds.
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

  void watch(int peer, Descriptor socket);  // treats the end of the connection as the peer's death
  void say_leaving();                       // announces over the watched connections that this rank leaves
  void drop_watches() { watches_.clear(); }

  void on_loss(int peer, LossKind kind, const std::string& why);  // a link has detected the loss of its peer
  void note_loss(int lost, LossKind kind, const std::string& why);  // queues a loss
  void on_lost(int peer, const Frame& frame);  // `peer` reports that a rank, perhaps this one, is lost
  // `on_exclusion`: `peer` treats this rank as cut off. `on_cause`: `peer` failed an operation because of a lost rank.
  void on_exclusion(int peer);
  void on_cause(int peer, const FailureCause& cause);
  void believe_gossip(Clock::time_point now);  // accepts reports of departures that are old enough

  bool has_new() const { return !new_losses_.empty(); }
  bool waits_for_time() const { return !gossip_.empty() || has_new(); }
  // Returns how many of the new losses to settle now. While nothing moves, all of them: the lost ranks' last messages
  // have been handled. While other operations move, only losses that are old enough.
  size_t heard_out(bool anything_moves) const;
  std::vector<NewLoss> take(size_t count);  // removes and returns the first `count` new losses

 private:
  struct Gossip {
    Clock::time_point believed_at;
    std::string why;
  };
  void on_watch_ready(int peer);

  RankState& state_;
  Peers& peers_;
  std::map<int, Descriptor> watches_;  // by rank
  std::map<int, Gossip> gossip_;       // reports from other ranks about ranks that left
  std::vector<NewLoss> new_losses_;    // in the order of their detection
};

}  // namespace multiring
