// Checks rails and wires at regular times, and collects the rails that were lost.
//
// A wire is the set of all rails to one host's rank. RankState::mutex guards the state, and every caller holds it. The
// progress thread does the checks; a caller takes the losses.
#pragma once

#include <utility>
#include <vector>

#include "event_recorder.h"
#include "memory/clock.h"
#include "peers.h"
#include "rank_state.h"

namespace multiring {

class RailWatch {
 public:
  RailWatch(RankState& state, Peers& peers, EventRecorder& recorder)
      : state_(state), peers_(peers), recorder_(recorder) {}

  bool needs_watching() const;
  bool is_rail_look_due() const { return Clock::now() >= next_rail_look_; }
  bool is_wire_look_due() const { return Clock::now() >= next_wire_look_; }
  void watch_rails();  // abandons rails that are silent while another rail of the link works
  void watch_wires();  // breaks off links whose rails are all silent
  std::vector<RailLoss> take_losses() { return std::exchange(losses_, {}); }  // rails lost since the last call

 private:
  RankState& state_;
  Peers& peers_;
  EventRecorder& recorder_;
  Clock::time_point next_rail_look_{};
  Clock::time_point next_wire_look_{};
  std::vector<RailLoss> losses_;
};

}  // namespace multiring
