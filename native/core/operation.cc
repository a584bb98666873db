#include "operation.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <set>
#include <utility>

namespace multiring {
namespace {

// Bytes one call of drive handles before it lets others have a turn; also keeps sources in cache.
constexpr uint64_t kQuantum = 512 * 1024;
constexpr uint64_t kTurn = 4 * kQuantum;
constexpr uint8_t kCompletion = 0x80;  // + round: the sender is done with everybody's buffers
constexpr uint8_t kEager = 0x40;   // + its place on its line: a note that brings what a move sends
static_assert(kCompletion - kEager == kMostEager);
// Stays in the first-level cache between combining and writing. Larger ones let reads and writes come in turns that the
// memory feels: over a pool of buffers 4 KiB took 53 us for 1 MiB on two ranks, 16 KiB 71; in cache there is no difference.
constexpr uint64_t kSliceBlock = 4 * 1024;
// Ordinary memory up to here is copied into the segment and back rather than read by the kernel for the peers: copies of
// what stays in cache cost less than its pages' pinning. docs/decisions/0006 has the figures.
constexpr uint64_t kMostStaged = 8 << 20;
constexpr uint64_t kMostStagedInAll = 64 << 20;  // by all operations in flight: more would not stay in cache
constexpr size_t kSlotsAt = 17;  // in a note: 7 bytes, where the sender has its exchange slots
constexpr size_t kMostStretches = 32;  // that an operation keeps; where there are more, those with short gaps become one
constexpr uint32_t kExplainChannel = 0xff00;  // + round; schedules use channels below

void put_u32(std::string& to, uint32_t value) { to.append(reinterpret_cast<const char*>(&value), sizeof value); }

uint32_t get_u32(const std::string& from, size_t at) {
  uint32_t value = 0;
  std::memcpy(&value, from.data() + at, sizeof value);
  return value;
}

std::string packed(const std::map<int, std::string>& descriptions) {
  std::string body;
  for (const auto& [rank, text] : descriptions) {
    put_u32(body, static_cast<uint32_t>(rank));
    put_u32(body, static_cast<uint32_t>(text.size()));
    body += text;
  }
  std::string whole;
  put_u32(whole, static_cast<uint32_t>(body.size()));
  return whole + body;
}

void unpack(const std::string& whole, std::map<int, std::string>& into) {
  size_t at = 4;
  while (at + 8 <= whole.size()) {
    const auto rank = static_cast<int>(get_u32(whole, at));
    const size_t size = std::min<size_t>(get_u32(whole, at + 4), whole.size() - at - 8);
    into.try_emplace(rank, whole, at + 8, size);
    at += 8 + size;
  }
}

std::vector<const Move*> reductions_of(const Program& program) {
  std::vector<const Move*> found;
  for (const Move& move : program.moves) {
    if (move.kind == MoveKind::reduce) found.push_back(&move);
  }
  return found;
}

}  // namespace

uint32_t Program::lanes() const { return std::min({segments, kMostLanes, kExplainChannel / uint32_t{channels}}); }

void combine_published(const Program& program, const SharedSlots& slots, uint64_t sequence, std::byte* target, size_t bytes) {
  if (bytes == 0) return;
  const auto found = std::find_if(program.moves.begin(), program.moves.end(),
                                  [](const Move& move) { return move.kind == MoveKind::reduce; });
  if (found == program.moves.end()) return;
  std::array<const void*, 64> sources;
  assert(found->peers.size() <= sources.size());
  for (size_t i = 0; i < found->peers.size(); ++i) sources[i] = slots.payload(found->peers[i], sequence);
  combine(program.dtype, program.op, target, sources.data(), static_cast<int>(found->peers.size()),
          bytes / size_of(program.dtype), program.divisor);
}

Operation::Operation(OperationSpec spec, Host& host) : spec_(std::move(spec)), host_(host) {
  descriptions_[host_.rank()] = spec_.description;
  std::set<int> partners;
  for (const Round& round : *spec_.rounds) partners.insert({round.to, round.from});
  if (spec_.program) {
    for (const Move& move : spec_.program->moves) partners.insert(move.peers.begin(), move.peers.end());
  }
  partners.erase(host_.rank());
  partners_.assign(partners.begin(), partners.end());
  if (spec_.program && spec_.program->lowering == Lowering::notes && host_.lowers() && spec_.user_bytes > 0) {
    state_ = State::eager;
  }
}

Operation::~Operation() {
  if (scratch_ != nullptr) host_.segment().release(scratch_);
  unstage();
}

bool Operation::involves(int rank) const {
  return std::find(spec_.members.begin(), spec_.members.end(), rank) != spec_.members.end();
}

std::byte* Operation::address(const Lane& lane, uint8_t space, uint64_t offset) const {
  if (space == 2) return scratch_ + lane.slot * spec_.program->scratch_bytes + offset;
  return spec_.bases[space] + lane.segment * spec_.program->segment_bytes + offset;
}

const std::vector<Move>& Operation::moves_of(const Lane& lane) const {
  const Program& program = *spec_.program;
  return program.last && lane.segment + 1 == program.segments ? program.last->moves : program.moves;
}

StreamKey Operation::stream_of(const Lane& lane, uint16_t channel) const {
  return {spec_.key, static_cast<uint16_t>(lane.slot * spec_.program->channels + channel)};
}

void Operation::on_round(int peer, const Frame& frame, std::span<const std::byte> payload) {
  if (frame.round < kEager || frame.round >= kCompletion) {
    notes_.insert_or_assign(frame.round, frame);
  } else {
    const auto place = static_cast<uint8_t>(frame.round - kEager);
    eager_came_[{{peer, frame.channel}, place}] = {frame, {payload.begin(), payload.end()}};
  }
}

bool Operation::drive() {
  bool any = false;
  if (state_ == State::in_slots) any |= meet();
  if (state_ == State::eager) any |= eager();
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
  host_.segment().mapping().control().in_slots.fetch_add(1, std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_seq_cst);  // now the slots may be looked at; see SharedSlots::wake_waiting
  if (!is_published) spec_.slots->publish(spec_.key.sequence, spec_.digest, spec_.bases[1], spec_.program ? spec_.user_bytes : 0);
}

void Operation::leave_slots(State state) {
  host_.segment().mapping().control().in_slots.fetch_sub(1, std::memory_order_relaxed);
  state_ = state;
}

bool Operation::meet() {
  const SharedSlots& slots = *spec_.slots;
  const auto seen = slots.look(spec_.key.sequence, spec_.digest);
  if (!notes_.empty() || seen == SharedSlots::Seen::different) {
    leave_slots(State::agreeing);
    return true;
  }
  if (seen == SharedSlots::Seen::missing) return false;
  agreed = Clock::now();
  if (spec_.program) {
    const Reducing reducing(*this);
    combine_published(*spec_.program, slots, spec_.key.sequence, spec_.bases[1], spec_.user_bytes);
  }
  if (spec_.program && host_.logs_moves()) {
    for (const Move* reduction : reductions_of(*spec_.program)) {
      const auto index = static_cast<uint32_t>(reduction - spec_.program->moves.data());
      log_.push_back({Lowering::exchange, 0, index, reduction->size});
    }
  }
  leave_slots(State::draining);
  finish(State::done);
  return true;
}

// All ranks have been heard of, and with that where each has its slots.
void Operation::learn_slots() {
  if (!spec_.slots || !spec_.at_once || spec_.slots->knows_all()) return;
  for (size_t i = 0; i < spec_.rounds->size(); ++i) {
    const int from = (*spec_.rounds)[i].from;
    uint64_t offset = 0;
    std::memcpy(&offset, notes_.at(static_cast<uint8_t>(i)).note.data() + kSlotsAt, 7);
    std::byte* control = host_.link(from).reach(0, sizeof(ControlPage));
    std::byte* slots = offset == 0 ? nullptr : host_.link(from).reach(offset, SharedSlots::bytes());
    if (slots == nullptr || control == nullptr) continue;
    spec_.slots->learn(from, slots, *reinterpret_cast<ControlPage*>(control));
  }
}

// Whoever hears of a rank that does not come this way, or means something else, turns back to agreeing, and by its
// rounds turns back others. Nobody can have written its buffer by then: what makes a part complete has come from all
// of them, and on its way passed only ranks whose descriptors were equal. So whoever wrote one part can go on with the
// others: nobody turns back any more.
bool Operation::eager() {
  const Program& program = *spec_.program;
  if (lanes_.empty()) open_lanes();
  Lane& lane = lanes_.front();
  bool any = false;
  bool turns_back = !notes_.empty();
  while (!turns_back && lane.next < program.moves.size()) {
    const Move& move = program.moves[lane.next];
    if (move.kind == MoveKind::send) {
      send_eager(lane, move);
    } else if (!take_eager(lane, move)) {
      if (!conflict_) return any;
      turns_back = true;
      break;
    }
    if (host_.logs_moves()) {
      log_.push_back({Lowering::notes, 0, static_cast<uint32_t>(lane.next), move.size * move.peers.size()});
    }
    ++lane.next;
    any = true;
  }
  if (!turns_back) {
    agreed = Clock::now();
    finish(State::done);
    return true;
  }
  lanes_.clear();
  log_.clear();
  eager_sent_.clear();
  eager_taken_.clear();
  if (scratch_ != nullptr) host_.segment().release(std::exchange(scratch_, nullptr));
  state_ = State::agreeing;
  return true;
}

// Also what has no bytes is sent: with it comes that the sender means the same.
void Operation::send_eager(const Lane& lane, const Move& move) {
  for (const int peer : move.peers) {
    Frame note = note_of(static_cast<size_t>(kEager + eager_sent_[{peer, move.channel}]++));
    note.channel = move.channel;
    host_.link(peer).send_note(note, {address(lane, move.source_space, move.source_offset), move.size});
  }
}

// Combines, or copies, what the move's peers have sent; false, having done nothing, if something is missing or means another thing.
bool Operation::take_eager(const Lane& lane, const Move& move) {
  std::vector<const void*> sources;
  for (const int peer : move.peers) {
    if (peer == host_.rank()) {
      sources.push_back(address(lane, move.source_space, move.source_offset));
      continue;
    }
    const Line line{peer, move.channel};
    const auto found = eager_came_.find({line, eager_taken_[line]});
    if (found == eager_came_.end()) {
      host_.link(peer);  // connects it, if nothing has yet
      return false;
    }
    const auto& [frame, payload] = found->second;
    conflict_ |= !std::equal(spec_.digest.begin(), spec_.digest.end(), frame.note.begin()) || payload.size() != move.size;
    if (conflict_) return false;
    sources.push_back(payload.data());
  }
  for (const int peer : move.peers) {
    if (peer != host_.rank()) ++eager_taken_[{peer, move.channel}];
  }
  const Program& program = *spec_.program;
  std::byte* target = address(lane, move.target_space, move.target_offset);
  if (move.kind == MoveKind::copy) {
    std::memcpy(target, sources.front(), move.size);
    return true;
  }
  const Reducing reducing(*this);
  combine(program.dtype, program.op, target, sources.data(), static_cast<int>(sources.size()),
          move.size / size_of(program.dtype), move.last ? program.divisor : 1);
  return true;
}

bool Operation::drain() {
  for (int peer : partners_) {
    if (!host_.link(peer).drained(spec_.key)) return false;
  }
  finish(State::done);
  return true;
}

bool Operation::agree() {
  const auto& rounds = *spec_.rounds;
  if (round_ == rounds.size()) {
    if (!failed_peers_.empty()) return false;  // it may not touch their memory, as what it runs could
    agreed = Clock::now();
    learn_slots();
    round_ = 0;
    round_sent_ = false;
    if (conflict_) {
      state_ = State::explaining;
      return true;
    }
    state_ = spec_.program ? State::running : State::draining;
    if (spec_.program && choose_lowering()) return true;
    if (spec_.program) open_lanes();
    return true;
  }
  const Round& round = rounds[round_];
  bool moved_on = false;
  if (!round_sent_) {
    if (round_ == 0) stage();
    const size_t until = spec_.at_once ? rounds.size() : round_ + 1;
    for (size_t i = round_; i < until; ++i) host_.link(rounds[i].to).send(note_of(i));
    round_sent_ = true;
    moved_on = true;
  }
  const auto found = notes_.find(static_cast<uint8_t>(round_));
  if (found == notes_.end()) {
    host_.link(round.from);  // connects it, if nothing has yet
    return moved_on;
  }
  const auto& note = found->second.note;
  conflict_ |= note[16] != 0 || !std::equal(spec_.digest.begin(), spec_.digest.end(), note.begin());
  ++round_;
  round_sent_ = spec_.at_once;
  return true;
}

Frame Operation::note_of(size_t round) const {
  Frame note{.group = spec_.key.group, .sequence = spec_.key.sequence, .kind = FrameKind::round,
             .round = static_cast<uint8_t>(round)};
  std::copy(spec_.digest.begin(), spec_.digest.end(), note.note.begin());
  note.note[16] = conflict_ ? 1 : 0;
  if (spec_.slots) {
    const uint64_t slots = spec_.slots->offset();
    std::memcpy(note.note.data() + kSlotsAt, &slots, 7);
  }
  const Mapping& arena = host_.segment().mapping();
  const std::byte* shared = staged_ != nullptr ? staged_ : spec_.bases[1];
  if (spec_.program && arena.contains(shared, spec_.user_bytes)) {
    note.offset = static_cast<uint64_t>(shared - arena.base());  // never 0: there the control page lies
  }
  return note;
}

void Operation::stage() {
  if (!spec_.at_once || !spec_.program || spec_.program->lowering != Lowering::slice || !host_.lowers()) return;
  const uint64_t bytes = spec_.user_bytes;
  if (bytes == 0 || bytes > kMostStaged || host_.staged_bytes() + bytes > kMostStagedInAll) return;
  if (host_.segment().mapping().contains(spec_.bases[1], bytes)) return;
  try {
    staged_ = host_.segment().allocate(bytes);
  } catch (const Fault&) {  // a full segment: move by move, then
    return;
  }
  host_.staged_bytes() += bytes;
  copy_but_slice(staged_, spec_.bases[1]);
}

void Operation::unstage() {
  if (staged_ == nullptr) return;
  host_.segment().release(std::exchange(staged_, nullptr));
  host_.staged_bytes() -= spec_.user_bytes;
}

// The slices themselves nobody else reads or writes.
void Operation::copy_but_slice(std::byte* to, const std::byte* from) const {
  uint64_t done = 0;
  for (const Move* own : reductions_of(*spec_.program)) {  // in the order of memory
    std::memcpy(to + done, from + done, own->target_offset - done);
    done = own->target_offset + own->size;
  }
  std::memcpy(to + done, from + done, spec_.user_bytes - done);
}

// Whether all ranks run the program as a lowering: they have all heard the same of each other.
bool Operation::choose_lowering() {
  if (!spec_.at_once || spec_.program->lowering != Lowering::slice || !host_.lowers()) return false;
  std::vector<const Move*> found = reductions_of(*spec_.program);
  if (found.empty() || note_of(0).offset == 0) return false;
  std::map<int, uint64_t> offsets;
  for (size_t i = 0; i < spec_.rounds->size(); ++i) {
    offsets[(*spec_.rounds)[i].from] = notes_.at(static_cast<uint8_t>(i)).offset;
  }
  for (const int peer : found.front()->peers) {
    const bool own = peer == host_.rank();
    std::byte* at = own ? spec_.bases[1] : host_.link(peer).reach(offsets[peer], spec_.user_bytes);
    if (at == nullptr || (!own && offsets[peer] == 0)) {
      reached_.clear();
      return false;
    }
    reached_.push_back(at);
  }
  slices_ = std::move(found);
  state_ = State::slicing;
  return true;
}

bool Operation::slice() {
  const Program& program = *spec_.program;
  const std::vector<int>& peers = slices_.front()->peers;  // of all of them
  std::vector<const void*> sources(reached_.size());
  for (uint64_t budget = kTurn; slice_ < slices_.size();) {
    const Move& sliced = *slices_[slice_];
    const Reducing reducing(*this);
    while (budget > 0 && progress_ < sliced.size) {
      const uint64_t size = std::min(kSliceBlock, sliced.size - progress_);
      const uint64_t at = sliced.target_offset + progress_;
      for (size_t i = 0; i < reached_.size(); ++i) sources[i] = reached_[i] + at;
      std::byte* own = spec_.bases[1] + at;
      combine(program.dtype, program.op, own, sources.data(), static_cast<int>(sources.size()),
              size / size_of(program.dtype), program.divisor);
      if (reads_failed_memory(peers)) return false;
      for (std::byte* buffer : reached_) {
        if (buffer + at != own) std::memcpy(buffer + at, own, size);
      }
      progress_ += size;
      budget -= std::min(budget, size);
    }
    if (progress_ < sliced.size) return true;
    if (reads_failed_memory(peers)) return false;  // of an empty slice, too: the others' are told that it is over
    if (host_.logs_moves()) {
      const Lowering how = staged_ != nullptr ? Lowering::staged_slice : Lowering::slice;
      log_.push_back({how, 0, static_cast<uint32_t>(&sliced - program.moves.data()), progress_});
    }
    progress_ = 0;
    ++slice_;
  }
  for (size_t i = 0; i < spec_.rounds->size(); ++i) {
    Frame note = note_of(i);
    note.round = static_cast<uint8_t>(kCompletion + i);
    host_.link((*spec_.rounds)[i].to).send(note);
  }
  state_ = State::completing;
  return true;
}

// Done once everybody is done with this rank's buffer.
bool Operation::pass_barrier() {
  for (; round_ < spec_.rounds->size(); ++round_) {
    if (!notes_.contains(static_cast<uint8_t>(kCompletion + round_))) return false;
  }
  if (staged_ != nullptr) copy_but_slice(spec_.bases[1], staged_);
  finish(State::done);
  return true;
}

bool Operation::explain() {
  const auto& rounds = *spec_.rounds;
  if (round_ == rounds.size()) {
    state_ = State::draining;
    fault_ = FaultKind::mismatch;
    return true;
  }
  const Round& round = rounds[round_];
  const StreamKey key{spec_.key, static_cast<uint16_t>(kExplainChannel + round_)};
  bool moved_on = false;
  if (!round_sent_) {
    told_.reserve(rounds.size());  // the strings' bytes must not move while links read them
    told_.push_back(packed(descriptions_));
    host_.link(round.to).offer(key, reinterpret_cast<const std::byte*>(told_.back().data()), told_.back().size());
    host_.link(round.to).pump();
    round_sent_ = true;
    moved_on = true;
  }
  Link& link = host_.link(round.from);
  InStream& stream = link.in(key);
  for (auto bytes = link.peek(stream, kQuantum); !bytes.empty(); bytes = link.peek(stream, kQuantum)) {
    heard_.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    if (reads_failed_memory({round.from})) return false;
    link.consume(key, stream, bytes.size());
    moved_on = true;
  }
  if (heard_.size() >= 4 && heard_.size() >= 4 + get_u32(heard_, 0)) {
    unpack(heard_, descriptions_);
    heard_.clear();
    ++round_;
    round_sent_ = false;
    moved_on = true;
  }
  return moved_on;
}

void Operation::open_lanes() {
  const Program& program = *spec_.program;
  const uint32_t count = program.lanes();
  for (uint32_t i = 0; i < count; ++i) lanes_.push_back({.slot = static_cast<uint16_t>(i), .segment = i});
  if (program.scratch_bytes > 0) scratch_ = host_.segment().allocate(count * program.scratch_bytes);
}

bool Operation::run() {
  uint64_t budget = kTurn;
  bool any = false;
  for (Lane& lane : lanes_) any |= advance(lane, budget);
  const uint32_t segments = spec_.program->segments;
  std::erase_if(lanes_, [&](const Lane& lane) { return lane.segment >= segments; });
  std::stable_sort(lanes_.begin(), lanes_.end(), [](const Lane& a, const Lane& b) { return a.segment < b.segment; });
  if (lanes_.empty()) {
    state_ = State::draining;
    any = true;
  }
  return any;
}

// Does what can be done on a lane now, also its next segments; true if anything was.
bool Operation::advance(Lane& lane, uint64_t& budget) {
  const Program& program = *spec_.program;
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
      if (host_.logs_moves()) {
        log_.push_back({Lowering::none, lane.segment, static_cast<uint32_t>(lane.next), logged_bytes(lane, move)});
      }
      lane.progress = 0;
      ++lane.next;
      any = true;
    }
    // The next segment overwrites the lane's scratch, which peers may still be reading.
    if (program.scratch_bytes > 0 && !readers_of(lane).empty()) return any;
    lane.segment += program.lanes();
    lane.next = 0;
    any = true;
  }
  return any;
}

uint64_t Operation::logged_bytes(const Lane& lane, const Move& move) const {
  if (is_in_place(lane, move)) return 0;
  const auto own = static_cast<uint64_t>(std::count(move.peers.begin(), move.peers.end(), host_.rank()));
  return own * lane.progress + (move.peers.size() - own) * wire_bytes(move, lane.progress);
}

std::vector<int> Operation::readers_of(const Lane& lane) const {
  std::vector<int> readers;
  for (const int peer : partners_) {
    bool drained = true;
    for (uint16_t channel = 0; channel < spec_.program->channels; ++channel) {
      drained &= host_.link(peer).out(stream_of(lane, channel)).drained();
    }
    if (!drained) readers.push_back(peer);
  }
  return readers;
}

bool Operation::step(Lane& lane, const Move& move) {
  if (move.size == 0) return true;
  if (move.wire != Wire::none) {
    if (move.kind != MoveKind::send) return receive_coded(lane, move);
    send_coded(lane, move);
    return true;
  }
  if (move.kind == MoveKind::send) {
    for (int peer : move.peers) {
      Link& link = host_.link(peer);
      link.offer(stream_of(lane, move.channel), address(lane, move.source_space, move.source_offset), move.size,
                 move.channel);
      link.pump();
    }
    lane.progress = move.size;
    return true;
  }
  if (is_in_place(lane, move)) {
    lane.progress = move.size;
    return true;
  }
  return receive(lane, move);
}

// A copy within this rank whose bytes lie where they belong: an all_gather's own part, if the caller put it there.
bool Operation::is_in_place(const Lane& lane, const Move& move) const {
  return move.kind == MoveKind::copy && move.peers.front() == host_.rank() &&
         address(lane, move.source_space, move.source_offset) == address(lane, move.target_space, move.target_offset);
}

bool Operation::receive(Lane& lane, const Move& move) {
  const StreamKey key = stream_of(lane, move.channel);
  const uint64_t element = size_of(spec_.program->dtype);
  std::byte* target = address(lane, move.target_space, move.target_offset) + lane.progress;
  bool own = false;
  uint64_t ready = std::min(kQuantum, move.size - lane.progress);
  const void* sources[256];
  std::vector<const void*> many;
  const void** source = sources;
  if (move.peers.size() > 256) {
    many.resize(move.peers.size());
    source = many.data();
  }
  for (size_t i = 0; i < move.peers.size(); ++i) {
    if (move.peers[i] == host_.rank()) {
      source[i] = address(lane, move.source_space, move.source_offset) + lane.progress;
      own = true;
      continue;
    }
    Link& link = host_.link(move.peers[i]);
    if (move.kind == MoveKind::copy) {
      ready = link.copy(link.in(key), target, ready);
      continue;
    }
    const auto bytes = link.peek(link.in(key), ready);
    source[i] = bytes.data();
    ready = bytes.size();
    if (ready == 0) return false;
  }
  const Program& program = *spec_.program;
  ready -= ready % element;
  if (ready == 0) return false;
  if (move.kind == MoveKind::copy) {
    if (own) std::memcpy(target, source[0], ready);
  } else {
    const Reducing reducing(*this);
    combine(program.dtype, program.op, target, source, static_cast<int>(move.peers.size()), ready / element,
            move.last ? program.divisor : 1);
  }
  if (reads_failed_memory(move.peers)) return false;
  for (int peer : move.peers) {
    if (peer == host_.rank()) continue;
    Link& link = host_.link(peer);
    link.consume(key, link.in(key), ready);
  }
  lane.progress += ready;
  return true;
}

std::vector<int> Operation::waiting_for() const {
  std::set<int> ranks;
  if (state_ == State::in_slots) return spec_.slots->missing(spec_.key.sequence);
  if (state_ == State::eager) {
    if (lanes_.empty()) return {partners_.begin(), partners_.end()};
    const Move& move = spec_.program->moves[lanes_.front().next];
    for (const int peer : move.peers) {
      const Line line{peer, move.channel};
      const auto taken = eager_taken_.find(line);
      const uint8_t place = taken == eager_taken_.end() ? 0 : taken->second;
      if (peer != host_.rank() && !eager_came_.contains({line, place})) ranks.insert(peer);
    }
  } else if (state_ == State::agreeing || state_ == State::explaining || state_ == State::completing) {
    if (round_ < spec_.rounds->size()) ranks.insert((*spec_.rounds)[round_].from);
  } else if (state_ == State::running) {
    for (const Lane& lane : lanes_) {
      const auto& moves = moves_of(lane);
      if (lane.next == moves.size()) {
        for (const int peer : readers_of(lane)) ranks.insert(peer);
        continue;
      }
      const Move& move = moves[lane.next];
      for (int peer : move.peers) {
        if (peer == host_.rank()) continue;
        Link& link = host_.link(peer);
        if (link.in(stream_of(lane, move.channel)).pieces.empty() || link.has_failed(spec_.key)) ranks.insert(peer);
      }
    }
  } else if (state_ == State::draining) {
    for (int peer : partners_) {
      if (!host_.link(peer).drained(spec_.key)) ranks.insert(peer);
    }
  } else if (state_ == State::quieting) {
    ranks = loud_;
  } else if (state_ == State::slicing) {
    for (const int peer : slices_.front()->peers) {
      if (peer != host_.rank() && host_.link(peer).has_failed(spec_.key)) ranks.insert(peer);
    }
  }
  return {ranks.begin(), ranks.end()};
}

void Operation::finish(State state) {
  let_go();
  if (spec_.slots && state == State::done) spec_.slots->note_end(spec_.key.sequence);
  finished = Clock::now();
  state_ = state;
}

void Operation::let_go() {
  for (int peer : partners_) host_.link(peer).close(spec_.key);
  if (scratch_ != nullptr) host_.segment().release(std::exchange(scratch_, nullptr));
  unstage();
}

// Whether what came from one of them may be no part of the operation, because that one has failed in it.
bool Operation::reads_failed_memory(const std::vector<int>& peers) {
  return std::any_of(peers.begin(), peers.end(), [this](int peer) {
    return peer != host_.rank() && (host_.link(peer).has_failed(spec_.key) || failed_peers_.contains(peer));
  });
}

void Operation::on_failure(int peer) {
  failed_peers_.insert(peer);
  loud_.erase(peer);
}

void Operation::reduced(Clock::time_point start, Clock::time_point end) {
  if (!reductions_.empty() && start - reductions_.back().end <= joined_) {
    reductions_.back().end = end;
    reductions_.back().busy += end - start;
    return;
  }
  reductions_.push_back({start, end, end - start});
  while (reductions_.size() > kMostStretches) {
    joined_ *= 2;
    std::vector<Stretch> fewer;
    for (const Stretch& each : reductions_) {
      if (fewer.empty() || each.start - fewer.back().end > joined_) {
        fewer.push_back(each);
      } else {
        fewer.back().end = each.end;
        fewer.back().busy += each.busy;
      }
    }
    reductions_ = std::move(fewer);
  }
}

// Ranks that have not heard of a failure may go on writing into this rank's buffer, or its copy.
bool Operation::is_written_by_peers() const {
  const bool is_told = state_ == State::agreeing && (round_ > 0 || round_sent_) && spec_.at_once && spec_.program &&
                       spec_.program->lowering == Lowering::slice && note_of(0).offset != 0;
  return is_told || state_ == State::slicing || state_ == State::completing;
}

void Operation::fail(FaultKind kind, const std::string& text) {
  if (ended() || state_ == State::quieting) return;
  if (state_ == State::in_slots) {
    spec_.slots->withdraw(spec_.key.sequence);
    leave_slots(State::draining);
  }
  if (spec_.slots) spec_.slots->retire();
  fault_ = kind;
  fault_text_ = text;
  host_.segment().mapping().failures().enter(spec_.key);
  if (is_written_by_peers()) {
    if (staged_ != nullptr) {  // nobody's but this operation's: let them
      host_.segment().quarantine(staged_);
    } else {
      for (const int peer : spec_.members) {
        if (peer != host_.rank() && host_.shares_memory(peer) && !failed_peers_.contains(peer)) loud_.insert(peer);
      }
    }
  }
  if (loud_.empty()) {
    finish(State::failed);
    return;
  }
  let_go();
  quiet_by_ = Clock::now() + kQuietPatience;
  state_ = State::quieting;
}

bool Operation::quiet() {
  std::erase_if(loud_, [this](int peer) { return !host_.shares_memory(peer); });
  if (!loud_.empty() && Clock::now() < quiet_by_) return false;
  end_quieting();
  return true;
}

void Operation::end_quieting() {
  if (state_ != State::quieting) return;
  if (!loud_.empty()) {
    std::string who;
    for (const int peer : loud_) who += (who.empty() ? "" : ", ") + std::to_string(peer);
    fault_text_ += "; rank " + who + " has not answered since, and may still write into this rank's array";
    host_.segment().quarantine(spec_.bases[1]);
  }
  finish(State::failed);
}

}  // namespace multiring
