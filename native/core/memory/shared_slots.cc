#include "shared_slots.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <new>
#include <utility>

namespace multiring {

// The slots are not released with the object: when this rank no longer uses the group, a peer may still read the last
// operation's slot. See `recycle`.
SharedSlots::SharedSlots(int rank, std::vector<int> members, uint64_t steps, std::shared_ptr<Segment> segment)
    : rank_(rank), steps_(steps) {
  std::byte* block = segment->reserve(bytes());
  offset_ = static_cast<uint64_t>(block - segment->mapping().base());
  own_ = reinterpret_cast<Slot*>(block);
  for (size_t i = 0; i < 2; ++i) {
    new (&own_[i].stamp) std::atomic<uint64_t>(0);
    own_[i].digest = {};
  }
  for (const int member : members) members_.push_back({member, member == rank ? own_ : nullptr, nullptr});
}

void SharedSlots::learn(int rank, const std::byte* slots, ControlPage& control) {
  for (Member& member : members_) {
    if (member.rank != rank || member.slots != nullptr) continue;
    member.slots = reinterpret_cast<const Slot*>(slots);
    member.control = &control;
    ++known_;
  }
}

void SharedSlots::recycle(Segment& segment) {
  if (own_ == nullptr) return;
  retired_ = true;
  // Peers that still look at these slots find no stamp until another group's ranks publish in them.
  for (size_t i = 0; i < 2; ++i) own_[i].stamp.store(0, std::memory_order_release);
  segment.unreserve(reinterpret_cast<std::byte*>(own_), bytes());
  own_ = nullptr;
}

void SharedSlots::publish(uint64_t sequence, const Digest& digest, const void* data, size_t size) {
  assert(size <= kCapacity);
  if (own_ == nullptr) return;  // the slots belong to another group
  Slot& slot = own_[turn(sequence)];
  slot.digest = digest;
  if (size > 0) std::memcpy(slot.payload, data, size);
  slot.stamp.store(sequence, std::memory_order_release);
}

void SharedSlots::withdraw(uint64_t sequence) {
  if (own_ == nullptr) return;
  uint64_t expected = sequence;
  own_[turn(sequence)].stamp.compare_exchange_strong(expected, 0, std::memory_order_acq_rel);
}

SharedSlots::Seen SharedSlots::look(uint64_t sequence, const Digest& digest) const {
  Seen seen = Seen::all;
  for (const Member& member : members_) {
    const Slot& slot = member.slots[turn(sequence)];
    if (slot.stamp.load(std::memory_order_acquire) != sequence) {
      seen = Seen::missing;
    } else if (slot.digest != digest) {
      return Seen::different;
    }
  }
  return seen;
}

const std::byte* SharedSlots::payload(int rank, uint64_t sequence) const {
  const auto found = std::find_if(members_.begin(), members_.end(), [&](const Member& m) { return m.rank == rank; });
  return found->slots[turn(sequence)].payload;
}

std::vector<int> SharedSlots::missing(uint64_t sequence) const {
  std::vector<int> ranks;
  for (const Member& member : members_) {
    if (member.slots[turn(sequence)].stamp.load(std::memory_order_acquire) != sequence) ranks.push_back(member.rank);
  }
  return ranks;
}

}  // namespace multiring
