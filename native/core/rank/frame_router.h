// Dispatches the frames and events of links to the responsible parts of the rank.
//
// Every caller holds RankState::mutex: the driving thread, and callers that post.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "failure_detector.h"
#include "links/control_messages.h"
#include "links/link.h"
#include "operation_failures.h"
#include "operation_table.h"
#include "peers.h"
#include "rank_state.h"

namespace multiring {

class FrameRouter final : public LinkEvents {
 public:
  FrameRouter(RankState& state, Peers& peers, FailureDetector& detector, OperationTable& table,
              OperationFailures& failures, ControlMessages& control)
      : state_(state), peers_(peers), detector_(detector), table_(table), failures_(failures), control_(control) {}

  // Adds an operation to those in flight and delivers the frames that arrived for it earlier.
  void begin(const std::shared_ptr<Operation>& operation);

  void on_frame(int peer, const Frame& frame, std::span<const std::byte> payload) override;
  bool expects(const OperationKey& key) const override {
    const Operation* found = table_.find(key);
    return found != nullptr && !found->has_failed();
  }
  void on_loss(int peer, LossKind kind, const std::string& why) override { detector_.on_loss(peer, kind, why); }
  void on_stuck(const OperationKey& key, const std::string& why) override { failures_.note_stuck(key, why); }

 private:
  bool makes_sense(const Frame& frame) const;
  void on_control(int peer, const Frame& frame, std::span<const std::byte> payload);
  void on_where(int peer, const Frame& frame);
  void on_round(int peer, const Frame& frame, std::span<const std::byte> payload);

  RankState& state_;
  Peers& peers_;
  FailureDetector& detector_;
  OperationTable& table_;
  OperationFailures& failures_;
  ControlMessages& control_;
};

}  // namespace multiring
