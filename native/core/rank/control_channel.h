// Sends and receives control messages. One thread of the rank sleeps in `take`.
//
// Each function locks RankState::mutex itself. Any thread may call `send`; only one thread may call `take`.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "failure_detector.h"
#include "links/control_messages.h"
#include "peer_connector.h"
#include "peers.h"
#include "rank_state.h"
#include "sleepers.h"

namespace multiring {

class ControlChannel {
 public:
  ControlChannel(RankState& state, Peers& peers, PeerConnector& connector, ControlMessages& control, Sleepers& sleepers)
      : state_(state), peers_(peers), connector_(connector), control_(control), sleepers_(sleepers) {}

  // Sends a message to `rank`. Returns false if the rank is lost, or if there is no connection and only the other,
  // lower rank can make it. Throws FaultKind::state if the rank has too many unacknowledged messages.
  bool send(int rank, uint64_t group, uint64_t tag, std::span<const std::byte> payload);
  // Waits for messages and returns them in order. The vector is empty after `timeout_s` seconds; the result is nullopt
  // once the rank has stopped.
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
