// Checks that a program's moves have the form that its lowering assumes.
//
// The moves come from a Schedule, which is proven correct. A lowering is correct because it does the same as the moves,
// and it relies on the conditions checked here. If a change to a schedule, to its channels or to the segments of a
// buffer violates a condition, the program is rejected before it runs, instead of computing wrong sums.

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "links/link.h"
#include "memory/fault.h"
#include "program.h"

namespace multiring {
namespace {

constexpr uint8_t kOutput = 1;
constexpr uint8_t kScratch = 2;

[[noreturn]] void refuse(const char* lowering, size_t index, const std::string& what) {
  throw Fault(FaultKind::argument,
              std::string("move ") + std::to_string(index) + " of a program to be run as " + lowering + ": " + what);
}

// Returns whether the pieces cover [0, end) without gaps and overlaps.
bool is_tiled(std::vector<std::pair<uint64_t, uint64_t>> pieces, uint64_t end) {
  std::sort(pieces.begin(), pieces.end());
  uint64_t at = 0;
  for (const auto& [start, size] : pieces) {
    if (start != at) return false;
    at += size;
  }
  return at == end;
}

// Every reduction of a lowering must combine the contributions of all ranks, in the same order, and its part must not
// overlap the part of another reduction.
void check_reductions(const Program& program, const char* name) {
  const Move* first = nullptr;
  uint64_t done = 0;
  for (size_t i = 0; i < program.moves.size(); ++i) {
    const Move& move = program.moves[i];
    if (move.kind != MoveKind::reduce) continue;
    if (first == nullptr) first = &move;
    if (!move.last) refuse(name, i, "it does not combine all contributions");
    if (move.peers != first->peers) refuse(name, i, "it combines other ranks, or in another order, than the first");
    if (move.target_space != kOutput || move.target_offset < done)
      refuse(name, i, "it does not write in ascending order of memory");
    done = move.target_offset + move.size;
  }
}

// `slice`: each rank must combine its slices of all buffers in place, and copy the other slices from their owners.
void check_slice(const Program& program, uint64_t bytes) {
  check_reductions(program, "slice");
  std::vector<std::pair<uint64_t, uint64_t>> written;
  for (size_t i = 0; i < program.moves.size(); ++i) {
    const Move& move = program.moves[i];
    if (move.source_space == kScratch || move.target_space == kScratch) refuse("slice", i, "it uses scratch memory");
    if (move.kind == MoveKind::send) continue;
    if (move.kind == MoveKind::reduce && move.source_offset != move.target_offset)
      refuse("slice", i, "it is not in place");
    written.emplace_back(move.target_offset, move.size);
  }
  if (!is_tiled(written, bytes)) refuse("slice", program.moves.size(), "the moves do not write each byte once");
}

// `exchange`: each rank must combine the whole buffers of all ranks, and send a copy of its own.
void check_exchange(const Program& program, uint64_t bytes) {
  check_reductions(program, "exchange");
  std::map<uint64_t, std::pair<uint64_t, uint64_t>> aside;  // scratch offset -> source offset and size of the copy
  std::vector<std::pair<uint64_t, uint64_t>> written;
  for (size_t i = 0; i < program.moves.size(); ++i) {
    const Move& move = program.moves[i];
    if (move.size == 0) continue;  // another move may use the same offset
    if (move.kind == MoveKind::copy) {
      if (move.source_space != kOutput || move.target_space != kScratch)
        refuse("exchange", i, "it does not copy a contribution to scratch memory");
      aside[move.target_offset] = {move.source_offset, move.size};
      continue;
    }
    const auto copy = move.source_space == kScratch ? aside.find(move.source_offset) : aside.end();
    if (copy == aside.end() || copy->second.second != move.size)
      refuse("exchange", i, "it does not use a copy of a contribution");
    if (move.kind == MoveKind::send) continue;
    if (copy->second.first != move.target_offset) refuse("exchange", i, "it combines another part than it writes");
    written.emplace_back(move.target_offset, move.size);
  }
  if (!is_tiled(written, bytes)) refuse("exchange", program.moves.size(), "the moves do not write each byte once");
}

// `notes`: the program runs move by move, with two conditions. No move may write the buffer before all ranks have
// contributed, and each message must fit into a note.
void check_notes(const Program& program) {
  std::map<std::pair<int, uint16_t>, size_t> sent;
  for (size_t i = 0; i < program.moves.size(); ++i) {
    const Move& move = program.moves[i];
    if (move.kind == MoveKind::send) {
      if (move.size > kNoteBytes) refuse("notes", i, "it sends more than a note holds");
      for (const int peer : move.peers) {
        if (++sent[{peer, move.channel}] > kMostEager) refuse("notes", i, "it is one message too many to a rank");
      }
    } else if (move.target_space != kScratch && !move.last) {
      refuse("notes", i, "it writes the buffer before all ranks have contributed");
    }
  }
}

}  // namespace

void Program::complete() {
  for (const Move& move : moves) channels = std::max<uint16_t>(channels, static_cast<uint16_t>(move.channel + 1));
  check_lowering();
}

void Program::check_lowering() const {
  if (lowering == Lowering::none || moves.empty()) return;
  if (segments != 1 || last) refuse("a lowering", 0, "its buffer is cut into segments");
  for (size_t i = 0; i < moves.size(); ++i) {
    if (moves[i].wire != Wire::none) refuse("a lowering", i, "it uses a lossy wire");
  }
  if (lowering == Lowering::slice) check_slice(*this, segment_bytes);
  if (lowering == Lowering::exchange) check_exchange(*this, segment_bytes);
  if (lowering == Lowering::notes) check_notes(*this);
}

}  // namespace multiring
