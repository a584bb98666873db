// The operations in flight, and the frames that arrived for operations which this rank has not posted yet.
//
// RankState::mutex guards the state, and every caller holds it. Callers add operations; the driving thread ends them.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "event_recorder.h"
#include "failure_detector.h"
#include "links/control_messages.h"
#include "operation/operation.h"
#include "peers.h"
#include "rank_state.h"

namespace multiring {

struct UnexpectedFrame {
  int peer;
  Frame frame;
  std::vector<std::byte> payload;
};

class OperationTable {
 public:
  using Running = std::map<OperationKey, std::shared_ptr<Operation>>;

  OperationTable(RankState& state, const Peers& peers, ControlMessages& control, EventRecorder& recorder)
      : state_(state), peers_(peers), control_(control), recorder_(recorder) {}

  const Running& running() const { return running_; }
  bool empty() const { return running_.empty(); }
  Operation* find(const OperationKey& key) const {
    const auto found = running_.find(key);
    return found == running_.end() ? nullptr : found->second.get();
  }
  // Returns the group's oldest operation with a sequence number up to `until`; null if there is none.
  const Operation* oldest_of(uint64_t group, uint64_t until = UINT64_MAX) const {
    const auto found = running_.lower_bound({group, 0});
    return found == running_.end() || found->first.group != group || found->first.sequence > until
               ? nullptr
               : found->second.get();
  }
  uint64_t ended() const { return ended_; }  // number of operations that have ended since the start
  uint64_t& staged_bytes() { return staged_bytes_; }
  // Returns true for a small operation whose ranks are all on this host: its messages arrive as soon as they are
  // written.
  bool is_quick(const Operation& operation) const;
  bool are_all_quick() const;

  // Adds a new operation and returns the frames that arrived for it earlier, in order.
  std::vector<UnexpectedFrame> add(const std::shared_ptr<Operation>& operation);
  void end_if_over(const std::shared_ptr<Operation>& operation) {
    if (operation->ended() && running_.contains(operation->spec().key)) end(operation);
  }
  // Records an operation that was never in flight, because all ranks arrived within the call.
  void note_ended_at_once(const OperationSpec& model, const OperationKey& key, int64_t start_ns, int64_t end_ns);

  // The unexpected-message queue. Frames of an operation that ended here recently (`has_ended`) need not be kept.
  bool has_ended(const OperationKey& key) { return over(key) == key; }
  void keep_unexpected(UnexpectedFrame frame) { unexpected_[frame.frame.key()].push_back(std::move(frame)); }
  bool has_unexpected(const OperationKey& key) const { return unexpected_.contains(key); }
  void drop_unexpected(uint64_t group);
  size_t unexpected_frames() const;

  // Records the failure cause that a member reported for an operation. Only the first report counts.
  void note_cause(const OperationKey& key, const FailureCause& cause) { causes_.try_emplace(key, cause); }
  const FailureCause* cause_of(const OperationKey& key) const {
    const auto found = causes_.find(key);
    return found == causes_.end() ? nullptr : &found->second;
  }

 private:
  static constexpr size_t kQuickBytes = 4096;
  OperationKey& over(const OperationKey& key) { return over_[(key.group * 31 + key.sequence) % over_.size()]; }
  void end(const std::shared_ptr<Operation>& operation);

  RankState& state_;
  const Peers& peers_;
  ControlMessages& control_;
  EventRecorder& recorder_;
  uint64_t staged_bytes_ = 0;  // staged by all operations in flight
  Running running_;
  std::map<OperationKey, std::vector<UnexpectedFrame>> unexpected_;
  std::array<OperationKey, 256> over_;  // operations that ended here recently
  std::map<OperationKey, FailureCause> causes_;
  uint64_t ended_ = 0;
};

}  // namespace multiring
