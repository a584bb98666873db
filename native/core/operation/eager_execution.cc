#include "eager_execution.h"

#include <algorithm>
#include <cstring>

namespace multiring {

void EagerExecution::on_round(int peer, const Frame& frame, std::span<const std::byte> payload) {
  const auto place = static_cast<uint8_t>(frame.round - kEager);
  came_[{{peer, frame.channel}, place}] = {frame, {payload.begin(), payload.end()}};
}

EagerOutcome EagerExecution::advance(bool& moved) {
  const Program& program = operation_.program();
  if (!is_open_) operation_.open_scratch();
  is_open_ = true;
  bool turns_back = agreement_.has_heard();
  while (!turns_back && lane_.next < program.moves.size()) {
    const Move& move = program.moves[lane_.next];
    if (move.kind == MoveKind::send) {
      send(move);
    } else if (!take(move)) {
      if (!agreement_.has_conflict()) return EagerOutcome::waits;
      turns_back = true;
      break;
    }
    if (operation_.host.logs_moves()) {
      operation_.log.push_back(
          {Lowering::notes, 0, static_cast<uint32_t>(lane_.next), move.size * move.peers.size()});
    }
    ++lane_.next;
    moved = true;
  }
  moved = true;
  if (!turns_back) {
    operation_.agreed = Clock::now();
    return EagerOutcome::done;
  }
  operation_.log.clear();
  sent_.clear();
  taken_.clear();
  operation_.close_scratch();
  return EagerOutcome::turned_back;
}

// Sends empty messages, too, because their notes carry the sender's descriptor.
void EagerExecution::send(const Move& move) {
  for (const int peer : move.peers) {
    Frame note =
        agreement_.note_of(static_cast<size_t>(kEager + sent_[{peer, move.channel}]++), operation_.spec.bases[1]);
    note.channel = move.channel;
    operation_.host.link(peer).send_note(
        note, {operation_.address(lane_, move.source_space, move.source_offset), move.size});
  }
}

// Combines or copies the messages of the move's peers. Returns false, without effect, if a message is missing or has
// another descriptor.
bool EagerExecution::take(const Move& move) {
  const OperationSpec& spec = operation_.spec;
  std::vector<const void*> sources;
  for (const int peer : move.peers) {
    if (peer == operation_.rank()) {
      sources.push_back(operation_.address(lane_, move.source_space, move.source_offset));
      continue;
    }
    const Line line{peer, move.channel};
    const auto found = came_.find({line, taken_[line]});
    if (found == came_.end()) {
      operation_.host.link(peer);  // connects to the rank if there is no connection yet
      return false;
    }
    const auto& [frame, payload] = found->second;
    agreement_.note_conflict(!std::equal(spec.digest.begin(), spec.digest.end(), frame.note.begin()) ||
                             payload.size() != move.size);
    if (agreement_.has_conflict()) return false;
    sources.push_back(payload.data());
  }
  for (const int peer : move.peers) {
    if (peer != operation_.rank()) ++taken_[{peer, move.channel}];
  }
  const Program& program = operation_.program();
  std::byte* target = operation_.address(lane_, move.target_space, move.target_offset);
  if (move.kind == MoveKind::copy) {
    std::memcpy(target, sources.front(), move.size);
    return true;
  }
  const Reducing reducing(operation_);
  combine(program.dtype, program.op, target, sources.data(), static_cast<int>(sources.size()),
          move.size / size_of(program.dtype), move.last ? program.divisor : 1);
  return true;
}

std::set<int> EagerExecution::waiting_for() const {
  if (!is_open_) return {operation_.partners.begin(), operation_.partners.end()};
  std::set<int> ranks;
  const Move& move = operation_.program().moves[lane_.next];
  for (const int peer : move.peers) {
    const Line line{peer, move.channel};
    const auto taken = taken_.find(line);
    const uint8_t place = taken == taken_.end() ? 0 : taken->second;
    if (peer != operation_.rank() && !came_.contains({line, place})) ranks.insert(peer);
  }
  return ranks;
}

}  // namespace multiring
