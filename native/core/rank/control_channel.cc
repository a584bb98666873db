#include "control_channel.h"

#include <string>
#include <utility>

namespace multiring {

void ControlChannel::refuse_unfit(int rank, size_t bytes) const {
  const ContextConfig& config = state_.config;
  if (rank < 0 || rank >= config.size || rank == config.rank) {
    throw Fault(FaultKind::argument, "a control message to rank " + std::to_string(rank) +
                                         ": want another rank, below " + std::to_string(config.size));
  }
  if (bytes > kNoteBytes) {
    throw Fault(FaultKind::argument, "a control message of " + std::to_string(bytes) + " bytes: want at most " +
                                         std::to_string(kNoteBytes));
  }
}

bool ControlChannel::send(int rank, uint64_t group, uint64_t tag, std::span<const std::byte> payload) {
  state_.refuse_inherited();
  refuse_unfit(rank, payload.size());
  const RankState::Lock lock(state_.mutex);
  if (state_.stopped) throw Fault(FaultKind::state, "multiring was shut down");
  if (!state_.broken.empty()) throw Fault(FaultKind::state, state_.broken);
  if (peers_.is_lost(rank)) return false;
  // Only the lower rank of a pair can make the connection.
  if (peers_.link(rank) == nullptr && rank < state_.config.rank) return false;
  if (!control_.may_send(rank, payload.size())) {
    const auto waiting = control_.waiting_for(rank);
    throw Fault(FaultKind::state, "rank " + std::to_string(rank) + " has not acknowledged " +
                                      std::to_string(waiting.count) + " control messages of " +
                                      std::to_string(waiting.bytes) + " bytes; send more after it has taken them");
  }
  control_.note_sent(rank, payload.size());
  const Frame frame{.group = group, .sequence = tag, .kind = FrameKind::control};
  Link& known = connector_.link(rank);
  if (payload.empty()) {
    known.send(frame);
  } else {
    known.send_note(frame, payload);
  }
  if (peers_.congested()) sleepers_.wake_driver();
  return true;
}

std::optional<std::vector<ControlMessage>> ControlChannel::take(double timeout_s) {
  RankState::Lock lock(state_.mutex);
  control_.wait(lock, Clock::now() + as_duration(timeout_s));
  if (control_.has_lost()) {
    throw Fault(FaultKind::state, "control messages arrived faster than this rank took them; some are lost");
  }
  if (state_.stopped) return std::nullopt;
  auto taken = control_.take();
  for (const auto& [peer, amount] : taken.by_peer) {
    if (peers_.is_lost(peer)) continue;
    peers_.link(peer)->send({.kind = FrameKind::control_taken, .offset = amount.count, .length = amount.bytes});
  }
  if (peers_.congested()) sleepers_.wake_driver();
  return std::move(taken.messages);
}

}  // namespace multiring
