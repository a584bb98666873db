#include "operation.h"

#include <algorithm>
#include <set>
#include <utility>

namespace multiring {

Operation::Operation(OperationSpec spec, OperationHost& host) : record_(std::move(spec), host) {
  std::set<int> partners;
  for (const Round& round : *record_.spec.rounds) partners.insert({round.to, round.from});
  const Program* program = record_.spec.program.get();
  if (program != nullptr) {
    for (const Move& move : program->moves) partners.insert(move.peers.begin(), move.peers.end());
  }
  partners.erase(record_.rank());
  record_.partners.assign(partners.begin(), partners.end());
  const bool is_eager = program != nullptr && program->lowering == Lowering::notes;
  if (is_eager && host.lowers() && record_.spec.user_bytes > 0) state_ = State::eager;
}

Operation::~Operation() {
  record_.close_scratch();
  slices_.unstage();
}

bool Operation::involves(int rank) const {
  const auto& members = record_.spec.members;
  return std::find(members.begin(), members.end(), rank) != members.end();
}

void Operation::on_round(int peer, const Frame& frame, std::span<const std::byte> payload) {
  if (frame.round < kEager || frame.round >= kCompletion) {
    agreement_.on_round(frame);
  } else {
    eager_.on_round(peer, frame, payload);
  }
}

bool Operation::drive() {
  bool any = false;
  if (state_ == State::in_slots) any |= meet();
  if (state_ == State::eager) any |= run_eager();
  while (state_ == State::agreeing && agree()) any = true;
  while (state_ == State::explaining && explain()) any = true;
  if (state_ == State::running) any |= run();
  if (state_ == State::slicing) any |= slice();
  if (state_ == State::completing) any |= pass_barrier();
  if (state_ == State::draining) any |= drain();
  if (state_ == State::quieting) any |= quiet();
  if (any) {
    moved = Clock::now();
    culprit = -1;
  }
  return any;
}

void Operation::begin_in_slots(bool is_published) {
  state_ = State::in_slots;
  slots_.enter(is_published);
}

bool Operation::meet() {
  const auto seen = agreement_.has_heard() ? SharedSlots::Seen::different : slots_.advance();
  if (seen == SharedSlots::Seen::missing) return false;
  slots_.leave();
  if (seen == SharedSlots::Seen::different) {
    state_ = State::agreeing;
  } else {
    finish(State::done);
  }
  return true;
}

bool Operation::run_eager() {
  bool any = false;
  const auto outcome = eager_.advance(any);
  if (outcome == EagerOutcome::done) finish(State::done);
  if (outcome == EagerOutcome::turned_back) state_ = State::agreeing;
  return any;
}

bool Operation::agree() {
  if (!agreement_.is_over()) {
    if (!agreement_.has_begun()) slices_.stage();
    return agreement_.agree(slices_.shared());
  }
  if (!record_.failed_peers.empty()) return false;  // running could access memory that those peers no longer provide
  record_.agreed = Clock::now();
  agreement_.learn_slots();
  agreement_.end();
  if (agreement_.has_conflict()) {
    state_ = State::explaining;
  } else if (!record_.spec.program) {
    state_ = State::draining;
  } else if (slices_.choose()) {
    state_ = State::slicing;
  } else {
    state_ = State::running;
    moves_.open();
  }
  return true;
}

bool Operation::explain() {
  if (!agreement_.is_over()) return agreement_.explain();
  state_ = State::draining;
  fault_ = FaultKind::mismatch;
  return true;
}

bool Operation::run() {
  const bool any = moves_.advance();
  if (moves_.is_done()) state_ = State::draining;
  return any;
}

bool Operation::slice() {
  const auto outcome = slices_.advance();
  if (outcome == SliceOutcome::done) state_ = State::completing;
  return outcome != SliceOutcome::waits;
}

bool Operation::pass_barrier() {
  if (slices_.pass_barrier() != SliceOutcome::done) return false;
  finish(State::done);
  return true;
}

bool Operation::drain() {
  for (int peer : record_.partners) {
    if (!record_.host.link(peer).drained(record_.key())) return false;
  }
  finish(State::done);
  return true;
}

std::vector<int> Operation::waiting_for() const {
  std::set<int> ranks;
  switch (state_) {
    case State::in_slots:
      return record_.spec.slots->missing(record_.key().sequence);
    case State::eager:
      ranks = eager_.waiting_for();
      break;
    case State::agreeing:
    case State::explaining:
      if (!agreement_.is_over()) ranks.insert(agreement_.awaited());
      break;
    case State::running:
      ranks = moves_.waiting_for();
      break;
    case State::slicing:
      for (const int peer : slices_.peers()) {
        if (peer != record_.rank() && record_.host.link(peer).has_failed(record_.key())) ranks.insert(peer);
      }
      break;
    case State::completing:
      if (!slices_.is_past_barrier()) ranks.insert(slices_.awaited());
      break;
    case State::draining:
      for (int peer : record_.partners) {
        if (!record_.host.link(peer).drained(record_.key())) ranks.insert(peer);
      }
      break;
    case State::quieting:
      ranks = quieting_.loud();
      break;
    default:
      break;
  }
  return {ranks.begin(), ranks.end()};
}

void Operation::finish(State state) {
  release_memory();
  const auto& slots = record_.spec.slots;
  if (slots && state == State::done) slots->note_end(record_.key().sequence);
  finished = Clock::now();
  state_ = state;
}

void Operation::release_memory() {
  for (int peer : record_.partners) record_.host.link(peer).close(record_.key());
  record_.close_scratch();
  slices_.unstage();
}

void Operation::on_failure(int peer) {
  record_.failed_peers.insert(peer);
  quieting_.on_quiet(peer);
}

// Ranks that do not know of a failure may continue to write into this rank's buffer, or into its staged copy.
bool Operation::is_written_by_peers() const {
  const bool is_told = state_ == State::agreeing && agreement_.is_told_all_at_once() && slices_.is_offered();
  return is_told || state_ == State::slicing || state_ == State::completing;
}

void Operation::fail(FaultKind kind, const std::string& text) {
  if (ended() || state_ == State::quieting) return;
  if (state_ == State::in_slots) {
    slots_.withdraw();
    slots_.leave();
    state_ = State::draining;
  }
  if (record_.spec.slots) record_.spec.slots->retire();
  fault_ = kind;
  fault_text_ = text;
  record_.host.segment().mapping().failures().enter(record_.key());
  if (is_written_by_peers()) {
    if (slices_.is_staged()) {
      slices_.quarantine_staged();  // only this operation uses the copy, so peers may write into it
    } else {
      quieting_.begin();
    }
  }
  if (quieting_.waits_for_nobody()) {
    finish(State::failed);
    return;
  }
  release_memory();
  state_ = State::quieting;
}

bool Operation::quiet() {
  if (!quieting_.is_over()) return false;
  end_quieting();
  return true;
}

void Operation::end_quieting() {
  if (state_ != State::quieting) return;
  fault_text_ += quieting_.end();
  finish(State::failed);
}

}  // namespace multiring
