#include "move_execution.h"

#include <algorithm>
#include <cstring>

namespace multiring {

void MoveExecution::open() {
  const uint32_t count = operation_.program().lanes();
  for (uint32_t i = 0; i < count; ++i) lanes_.push_back({.slot = static_cast<uint16_t>(i), .segment = i});
  operation_.open_scratch();
}

const std::vector<Move>& MoveExecution::moves_of(const Lane& lane) const {
  const Program& program = operation_.program();
  return program.last && lane.segment + 1 == program.segments ? program.last->moves : program.moves;
}

bool MoveExecution::advance() {
  uint64_t budget = kTurn;
  bool any = false;
  for (Lane& lane : lanes_) any |= advance(lane, budget);
  const uint32_t segments = operation_.program().segments;
  std::erase_if(lanes_, [&](const Lane& lane) { return lane.segment >= segments; });
  std::stable_sort(lanes_.begin(), lanes_.end(), [](const Lane& a, const Lane& b) { return a.segment < b.segment; });
  return any || lanes_.empty();
}

// Does the work of a lane that is possible now, including its next segments. Returns true if anything moved.
bool MoveExecution::advance(Lane& lane, uint64_t& budget) {
  const Program& program = operation_.program();
  bool any = false;
  while (lane.segment < program.segments) {
    const auto& moves = moves_of(lane);
    while (lane.next < moves.size()) {
      if (budget == 0) return any;
      const Move& move = moves[lane.next];
      const uint64_t before = lane.progress;
      const bool worked = step(lane, move);
      any |= worked;
      budget -= std::min(budget, lane.progress - before);
      if (lane.progress < move.size) {
        if (!worked) return any;
        continue;
      }
      if (operation_.host.logs_moves()) {
        operation_.log.push_back(
            {Lowering::none, lane.segment, static_cast<uint32_t>(lane.next), logged_bytes(lane, move)});
      }
      lane.progress = 0;
      ++lane.next;
      any = true;
    }
    // The next segment overwrites the lane's scratch memory, which peers may still be reading.
    if (program.scratch_bytes > 0 && !readers_of(lane).empty()) return any;
    lane.segment += program.lanes();
    lane.next = 0;
    any = true;
  }
  return any;
}

uint64_t MoveExecution::logged_bytes(const Lane& lane, const Move& move) const {
  if (is_in_place(lane, move)) return 0;
  const auto own = static_cast<uint64_t>(std::count(move.peers.begin(), move.peers.end(), operation_.rank()));
  return own * lane.progress + (move.peers.size() - own) * wire_bytes(move, lane.progress);
}

std::vector<int> MoveExecution::readers_of(const Lane& lane) const {
  std::vector<int> readers;
  for (const int peer : operation_.partners) {
    bool drained = true;
    for (uint16_t channel = 0; channel < operation_.program().channels; ++channel) {
      drained &= operation_.host.link(peer).out(operation_.stream_of(lane, channel)).drained();
    }
    if (!drained) readers.push_back(peer);
  }
  return readers;
}

bool MoveExecution::step(Lane& lane, const Move& move) {
  if (move.size == 0) return true;
  if (move.wire != Wire::none) {
    if (move.kind != MoveKind::send) return coded_.receive(lane, move);
    coded_.send(lane, move);
    return true;
  }
  if (move.kind == MoveKind::send) {
    send(lane, move);
    return true;
  }
  if (is_in_place(lane, move)) {
    lane.progress = move.size;
    return true;
  }
  return receive(lane, move);
}

void MoveExecution::send(Lane& lane, const Move& move) {
  for (int peer : move.peers) {
    Link& link = operation_.host.link(peer);
    link.offer(operation_.stream_of(lane, move.channel),
               operation_.address(lane, move.source_space, move.source_offset), move.size, move.channel);
    link.pump();
  }
  lane.progress = move.size;
}

// Returns whether the move is a copy within this rank whose source is its target. That happens in an all_gather if the
// caller has put this rank's part at its final place.
bool MoveExecution::is_in_place(const Lane& lane, const Move& move) const {
  return move.kind == MoveKind::copy && move.peers.front() == operation_.rank() &&
         operation_.address(lane, move.source_space, move.source_offset) ==
             operation_.address(lane, move.target_space, move.target_offset);
}

// Returns how many bytes of a move have arrived from all its peers, and sets `sources` to their addresses. The bytes of
// a copy from another rank are written to `target` instead.
uint64_t MoveExecution::ready_from(const Lane& lane, const Move& move, const void** sources, std::byte* target) const {
  const StreamKey key = operation_.stream_of(lane, move.channel);
  uint64_t ready = std::min(kQuantum, move.size - lane.progress);
  for (size_t i = 0; i < move.peers.size(); ++i) {
    if (move.peers[i] == operation_.rank()) {
      sources[i] = operation_.address(lane, move.source_space, move.source_offset) + lane.progress;
      continue;
    }
    Link& link = operation_.host.link(move.peers[i]);
    if (move.kind == MoveKind::copy) {
      ready = link.copy(link.in(key), target, ready);
      continue;
    }
    const auto bytes = link.peek(link.in(key), ready);
    sources[i] = bytes.data();
    ready = bytes.size();
    if (ready == 0) return 0;
  }
  return ready - ready % size_of(operation_.program().dtype);
}

bool MoveExecution::receive(Lane& lane, const Move& move) {
  const Program& program = operation_.program();
  std::byte* target = operation_.address(lane, move.target_space, move.target_offset) + lane.progress;
  const void* few[256];
  std::vector<const void*> many;
  const void** sources = few;
  if (move.peers.size() > std::size(few)) {
    many.resize(move.peers.size());
    sources = many.data();
  }
  const uint64_t ready = ready_from(lane, move, sources, target);
  if (ready == 0) return false;
  if (move.kind == MoveKind::copy) {
    if (move.peers.front() == operation_.rank()) std::memcpy(target, sources[0], ready);
  } else {
    const Reducing reducing(operation_);
    combine(program.dtype, program.op, target, sources, static_cast<int>(move.peers.size()),
            ready / size_of(program.dtype), move.last ? program.divisor : 1);
  }
  if (operation_.reads_failed_memory(move.peers)) return false;
  const StreamKey key = operation_.stream_of(lane, move.channel);
  for (int peer : move.peers) {
    if (peer == operation_.rank()) continue;
    Link& link = operation_.host.link(peer);
    link.consume(key, link.in(key), ready);
  }
  lane.progress += ready;
  return true;
}

std::set<int> MoveExecution::waiting_for() const {
  std::set<int> ranks;
  for (const Lane& lane : lanes_) {
    const auto& moves = moves_of(lane);
    if (lane.next == moves.size()) {
      for (const int peer : readers_of(lane)) ranks.insert(peer);
      continue;
    }
    const Move& move = moves[lane.next];
    for (int peer : move.peers) {
      if (peer == operation_.rank()) continue;
      Link& link = operation_.host.link(peer);
      const bool is_missing = link.in(operation_.stream_of(lane, move.channel)).pieces.empty();
      if (is_missing || link.has_failed(operation_.key())) ranks.insert(peer);
    }
  }
  return ranks;
}

}  // namespace multiring
