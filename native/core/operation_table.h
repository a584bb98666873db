// The operations in flight, and what has come for those that this rank has yet to post.
//
// Guarded by RankState::mutex, which every caller holds: callers post, whichever thread drives has operations end.
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

#include "control_messages.h"
#include "event_recorder.h"
#include "failure_detector.h"
#include "operation.h"
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
  // Null: none up to there.
  const Operation* oldest_of(uint64_t group, uint64_t until = UINT64_MAX) const {
    const auto found = running_.lower_bound({group, 0});
    return found == running_.end() || found->first.group != group || found->first.sequence > until
               ? nullptr
               : found->second.get();
  }
  uint64_t ended() const { return ended_; }  // ever
  uint64_t& staged_bytes() { return staged_bytes_; }
  // Small, and of ranks of this host: what it has to send is there as soon as it is written.
  bool is_quick(const Operation& operation) const;
  bool are_all_quick() const;

  // The frames that came before it, in order.
  std::vector<UnexpectedFrame> add(const std::shared_ptr<Operation>& operation);
  void end_if_over(const std::shared_ptr<Operation>& operation) {
    if (operation->ended() && running_.contains(operation->spec().key)) end(operation);
  }
  // One that was never in flight: all ranks were there at once.
  void note_ended_at_once(const OperationSpec& model, const OperationKey& key, int64_t start_ns, int64_t end_ns);

  // Unexpected messages. Of an operation that ended here lately nobody waits for what comes now.
  bool has_ended(const OperationKey& key) { return over(key) == key; }
  void keep_unexpected(UnexpectedFrame frame) { unexpected_[frame.frame.key()].push_back(std::move(frame)); }
  bool has_unexpected(const OperationKey& key) const { return unexpected_.contains(key); }
  void drop_unexpected(uint64_t group);
  size_t unexpected_frames() const;

  // What some member could not finish an operation in flight for, as it told.
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
  uint64_t staged_bytes_ = 0;  // of all of them
  Running running_;
  std::map<OperationKey, std::vector<UnexpectedFrame>> unexpected_;
  std::array<OperationKey, 256> over_;  // operations that ended here lately
  std::map<OperationKey, FailureCause> causes_;
  uint64_t ended_ = 0;
};

}  // namespace multiring
