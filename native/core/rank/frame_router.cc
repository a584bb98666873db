#include "frame_router.h"

namespace multiring {

void FrameRouter::begin(const std::shared_ptr<Operation>& operation) {
  for (const auto& [peer, frame, payload] : table_.add(operation)) on_frame(peer, frame, payload);
  failures_.prepare(*operation);
}

// Returns whether the fields of a frame are valid, namely the ranks and loss kinds in it.
bool FrameRouter::makes_sense(const Frame& frame) const {
  const auto of_this_job = frame.offset < static_cast<uint64_t>(state_.config.size);
  const auto kind = static_cast<LossKind>(frame.slot);
  switch (frame.kind) {
    case FrameKind::there:
      return of_this_job;
    case FrameKind::lost:
      return of_this_job && is_loss_of_rank(kind);
    case FrameKind::fail:
      // A stall may name no rank.
      return kind >= LossKind::died && kind <= LossKind::cut_off &&
             (of_this_job || (kind == LossKind::silent && static_cast<int64_t>(frame.offset) == -1));
    default:
      return true;
  }
}

void FrameRouter::on_frame(int peer, const Frame& frame, std::span<const std::byte> payload) {
  if (!makes_sense(frame)) {
    detector_.note_loss(
        peer, LossKind::died,
        "it sent a frame of kind " + std::to_string(static_cast<int>(frame.kind)) + " with invalid fields");
    return;
  }
  switch (frame.kind) {
    case FrameKind::lost:
      detector_.on_lost(peer, frame);
      return;
    case FrameKind::control:
    case FrameKind::control_taken:
      on_control(peer, frame, payload);
      return;
    case FrameKind::where:
      on_where(peer, frame);
      return;
    case FrameKind::fail:
      failures_.on_fail(peer, frame);
      return;
    case FrameKind::round:
      on_round(peer, frame, payload);
      return;
    default:
      break;
  }
  Operation* operation = table_.find(frame.key());
  if (operation == nullptr) return;
  if (frame.kind == FrameKind::quiet) operation->on_quiet(peer);
  if (frame.kind == FrameKind::there) operation->culprit = static_cast<int>(frame.offset);
}

void FrameRouter::on_control(int peer, const Frame& frame, std::span<const std::byte> payload) {
  if (frame.kind == FrameKind::control_taken) {
    control_.note_taken(peer, {frame.offset, frame.length});
  } else if (!control_.receive(peer, frame, payload)) {
    detector_.note_loss(peer, LossKind::died, "it sent more control messages than may be unacknowledged");
  }
}

// Answers which rank this rank waits for in the operation. If this rank has not posted the operation, the answer comes
// from the group's oldest operation up to it.
void FrameRouter::on_where(int peer, const Frame& frame) {
  Frame answer{.group = frame.group, .sequence = frame.sequence, .kind = FrameKind::there};
  answer.offset = static_cast<uint64_t>(state_.config.rank);
  const Operation* asked = table_.find(frame.key());
  if (asked == nullptr) asked = table_.oldest_of(frame.group, frame.sequence);
  if (asked != nullptr) {
    const auto waits = asked->waiting_for();
    if (asked->culprit >= 0) {
      answer.offset = static_cast<uint64_t>(asked->culprit);
    } else if (!waits.empty()) {
      answer.offset = static_cast<uint64_t>(waits.front());
    }
  }
  peers_.link(peer)->send(answer);
}

void FrameRouter::on_round(int peer, const Frame& frame, std::span<const std::byte> payload) {
  if (Operation* operation = table_.find(frame.key())) {
    operation->on_round(peer, frame, payload);
  } else if (!table_.has_ended(frame.key()) && !failures_.has_stalled(frame.group)) {
    // The rank may still post the operation, because neither the operation nor its group has ended.
    table_.keep_unexpected({peer, frame, {payload.begin(), payload.end()}});
  }
}

}  // namespace multiring
