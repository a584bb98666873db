#include "agreement.h"

#include <algorithm>
#include <cstring>

namespace multiring {
namespace {

constexpr size_t kSlotsAt = 17;  // position in a note of the 7-byte offset of the sender's slots

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

}  // namespace

void Agreement::learn_slots() {
  const auto& slots = operation_.spec.slots;
  if (!slots || !operation_.spec.at_once || slots->knows_all()) return;
  for (size_t i = 0; i < rounds().size(); ++i) {
    const int from = rounds()[i].from;
    uint64_t offset = 0;
    std::memcpy(&offset, notes_.at(static_cast<uint8_t>(i)).note.data() + kSlotsAt, 7);
    std::byte* control = operation_.host.link(from).reach(0, sizeof(ControlPage));
    std::byte* theirs = offset == 0 ? nullptr : operation_.host.link(from).reach(offset, SharedSlots::bytes());
    if (theirs == nullptr || control == nullptr) continue;
    slots->learn(from, theirs, *reinterpret_cast<ControlPage*>(control));
  }
}

bool Agreement::agree(const std::byte* shared) {
  const Round& round = rounds()[round_];
  const OperationSpec& spec = operation_.spec;
  bool moved_on = false;
  if (!round_sent_) {
    const size_t until = spec.at_once ? rounds().size() : round_ + 1;
    for (size_t i = round_; i < until; ++i) operation_.host.link(rounds()[i].to).send(note_of(i, shared));
    round_sent_ = true;
    moved_on = true;
  }
  const auto found = notes_.find(static_cast<uint8_t>(round_));
  if (found == notes_.end()) {
    operation_.host.link(round.from);  // connects to the rank if there is no connection yet
    return moved_on;
  }
  const auto& note = found->second.note;
  conflict_ |= note[16] != 0 || !std::equal(spec.digest.begin(), spec.digest.end(), note.begin());
  ++round_;
  round_sent_ = spec.at_once;
  return true;
}

void Agreement::end() {
  round_ = 0;
  round_sent_ = false;
}

Frame Agreement::note_of(size_t round, const std::byte* shared) const {
  const OperationSpec& spec = operation_.spec;
  Frame note{.group = spec.key.group, .sequence = spec.key.sequence, .kind = FrameKind::round,
             .round = static_cast<uint8_t>(round)};
  std::copy(spec.digest.begin(), spec.digest.end(), note.note.begin());
  note.note[16] = conflict_ ? 1 : 0;
  if (spec.slots) {
    const uint64_t slots = spec.slots->offset();
    std::memcpy(note.note.data() + kSlotsAt, &slots, 7);
  }
  const Mapping& arena = operation_.host.segment().mapping();
  if (spec.program && arena.contains(shared, spec.user_bytes)) {
    note.offset = static_cast<uint64_t>(shared - arena.base());  // never 0, because the control page is at offset 0
  }
  return note;
}

bool Agreement::explain() {
  const Round& round = rounds()[round_];
  const StreamKey key{operation_.key(), static_cast<uint16_t>(kExplainChannel + round_)};
  bool moved_on = false;
  if (!round_sent_) {
    told_.reserve(rounds().size());  // the strings must not move while links read them
    told_.push_back(packed(descriptions_));
    Link& to = operation_.host.link(round.to);
    to.offer(key, reinterpret_cast<const std::byte*>(told_.back().data()), told_.back().size());
    to.pump();
    round_sent_ = true;
    moved_on = true;
  }
  Link& link = operation_.host.link(round.from);
  InStream& stream = link.in(key);
  for (auto bytes = link.peek(stream, kQuantum); !bytes.empty(); bytes = link.peek(stream, kQuantum)) {
    heard_.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    if (operation_.reads_failed_memory({round.from})) return false;
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

}  // namespace multiring
