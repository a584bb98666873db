// When rails and wires are looked at, and which rails were given up.
//
// Guarded by RankState::mutex, which every caller holds: the progress thread watches, a caller takes the losses.
#pragma once

#include <utility>
#include <vector>

#include "clock.h"
#include "event_recorder.h"
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
  void watch_rails();  // gives up rails over which nothing comes back, while another works
  void watch_wires();  // breaks off where nothing comes back over any rail
  std::vector<RailLoss> take_losses() { return std::exchange(losses_, {}); }  // since the last call

 private:
  RankState& state_;
  Peers& peers_;
  EventRecorder& recorder_;
  Clock::time_point next_rail_look_{};
  Clock::time_point next_wire_look_{};
  std::vector<RailLoss> losses_;
};

}  // namespace multiring
