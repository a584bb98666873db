// Control messages to and from other ranks: sent over whatever link there is, taken by one thread that sleeps here.
//
// Takes RankState::mutex itself, but for `on_frame`, which whichever thread drives calls with it. `send` is any
// caller's; `take` is one thread's.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "control_messages.h"
#include "failure_detector.h"
#include "peer_connector.h"
#include "peers.h"
#include "rank_state.h"
#include "sleepers.h"

namespace multiring {

class ControlChannel {
 public:
  ControlChannel(RankState& state, Peers& peers, PeerConnector& connector, ControlMessages& control, Sleepers& sleepers)
      : state_(state), peers_(peers), connector_(connector), control_(control), sleepers_(sleepers) {}

  // False: the rank is gone, or of another host, lower and not linked with. FaultKind::state: it does not take what was
  // sent to it.
  bool send(int rank, uint64_t group, uint64_t tag, std::span<const std::byte> payload);
  // What has come, and what is new here, in order; empty after `timeout_s`, nothing at all once the rank has stopped.
  std::optional<std::vector<ControlMessage>> take(double timeout_s);

 private:
  void refuse_unfit(int rank, size_t bytes) const;

  RankState& state_;
  Peers& peers_;
  PeerConnector& connector_;
  ControlMessages& control_;
  Sleepers& sleepers_;
};

}  // namespace multiring
