// Slots for small messages of a group on one host. Each rank writes a slot in its own segment and reads all others.
//
// An operation that runs in the slots takes one step. Descriptor and payload lie side by side, and the ranks wait only
// for the stamp that marks a slot as written. Each rank has two slots, which the group's operations use in turn. A rank
// that writes operation n + 2 has seen every rank in n + 1, and a rank that entered n + 1 had finished n. (A group's
// later operation does not start before an operation in the slots has ended: see OperationDriver::drive_each.)
//
// Each rank decides independently whether it runs an operation in the slots. A rank that does not write its slot sends
// the ordinary agreement notes, and the others then switch to that agreement. No rank can have finished by then,
// because a slot is missing.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "segment.h"

namespace multiring {

using Digest = std::array<uint8_t, 16>;

class SharedSlots {
 public:
  static constexpr size_t kCapacity = 16 * 1024;  // bytes of payload

  // `members`: world ranks, all on one host. `steps`: number of sequence numbers that one operation of the group takes.
  SharedSlots(int rank, std::vector<int> members, uint64_t steps, std::shared_ptr<Segment> segment);

  uint64_t offset() const { return offset_; }  // offset of this rank's slots in its segment; never 0
  static constexpr size_t bytes() { return 2 * sizeof(Slot); }
  // Sets the addresses of a member's slots and control page.
  void learn(int rank, const std::byte* slots, ControlPage& control);
  // Returns whether this rank may publish for `sequence`: the slots of all members are known, and the previous
  // operation has ended here. That end shows that every rank has finished the operation before the previous one.
  bool may_publish(uint64_t sequence) const {
    return known_ == members_.size() && !retired_ && sequence / steps_ == last_ended_ + 1;
  }
  bool knows_all() const { return known_ == members_.size(); }
  // Records that an operation of the group has ended after every rank entered it.
  void note_end(uint64_t sequence) { last_ended_ = std::max(last_ended_, sequence / steps_); }
  // Stops the use of the slots after a failed operation, because the progress of the other ranks is unknown.
  void retire() { retired_ = true; }
  // Gives this rank's slots back, for another group. The caller knows that no rank uses this group any more; otherwise
  // a peer could read another group's payload. An operation that the program has left in flight never ends by the slots.
  void recycle(Segment& segment);

  // Copies the payload (`size` bytes) and the descriptor's digest into this rank's slot, and stamps the slot.
  void publish(uint64_t sequence, const Digest& digest, const void* data, size_t size);
  void withdraw(uint64_t sequence);  // clears this rank's stamp, so that late ranks do not finish the operation
  enum class Seen : uint8_t { missing, different, all };
  Seen look(uint64_t sequence, const Digest& digest) const;  // different: a rank published another operation
  const std::byte* payload(int rank, uint64_t sequence) const;
  std::vector<int> missing(uint64_t sequence) const;  // the members that have not published for `sequence`

  // Call this after `publish`. It calls `ring(rank)` for every member that may sleep until this rank has published.
  template <typename Ring>
  void wake_waiting(Ring ring) const {
    // Pairs with the fence in SlotExecution::enter: a waiting rank increments ControlPage::in_slots before it reads the
    // slots.
    std::atomic_thread_fence(
        std::memory_order_seq_cst);
    for (const Member& member : members_) {
      if (member.control != nullptr && member.control->in_slots.load(std::memory_order_relaxed) != 0) ring(member.rank);
    }
  }

 private:
  struct Slot {
    alignas(64) std::atomic<uint64_t> stamp;  // sequence number of the published operation; 0 for none
    Digest digest;
    alignas(32) std::byte payload[kCapacity];
  };
  struct Member {
    int rank;
    const Slot* slots;     // null if not known yet
    ControlPage* control;  // null for this rank, and if not known yet
  };
  size_t turn(uint64_t sequence) const { return sequence / steps_ % 2; }

  const int rank_;
  const uint64_t steps_;
  std::vector<Member> members_;
  size_t known_ = 1;
  uint64_t last_ended_ = 0;  // index of the last operation of the group that has ended
  bool retired_ = false;
  Slot* own_ = nullptr;
  uint64_t offset_ = 0;
};

}  // namespace multiring
