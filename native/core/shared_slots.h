// Small messages of one group on one host: every rank writes into a slot of its own segment and reads all others'.
//
// An operation that meets here takes one step: descriptor and payload lie side by side, and the stamp that says they
// are there is the only thing anybody waits for. There are two slots a rank, used in turn by the group's operations:
// whoever writes operation n + 2 has seen every rank at n + 1, and a rank that came to n + 1 was done with n. (A later
// operation of a group is not begun before one that meets has ended: OperationDriver::drive_each.)
//
// Whether an operation meets is every rank's own choice. One that did not write its slot says so by telling the others
// the ordinary way, and they turn to that: with a slot missing nobody can have finished here.
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

  // `members`: world ranks, all of one host; `steps`: sequence numbers an operation of the group takes.
  SharedSlots(int rank, std::vector<int> members, uint64_t steps, std::shared_ptr<Segment> segment);

  uint64_t offset() const { return offset_; }  // of the own slots in the own segment; never 0
  static constexpr size_t bytes() { return 2 * sizeof(Slot); }
  // Where `rank` has its slots, and its control page.
  void learn(int rank, const std::byte* slots, ControlPage& control);
  // Whether this rank may publish for `sequence`: all are known, and the operation before has ended here, which shows
  // that every rank was done with the one before that.
  bool may_publish(uint64_t sequence) const {
    return known_ == members_.size() && !retired_ && sequence / steps_ == last_ended_ + 1;
  }
  bool knows_all() const { return known_ == members_.size(); }
  // An operation of the group ended, every rank having come to it.
  void note_end(uint64_t sequence) { last_ended_ = std::max(last_ended_, sequence / steps_); }
  // An operation failed without every rank having come to it: nothing is known of the others' place any more.
  void retire() { retired_ = true; }

  void publish(uint64_t sequence, const Digest& digest, const void* data, size_t size);
  void withdraw(uint64_t sequence);  // who comes late shall not find this rank there
  enum class Seen : uint8_t { missing, different, all };
  Seen look(uint64_t sequence, const Digest& digest) const;  // different: somebody published another operation
  const std::byte* payload(int rank, uint64_t sequence) const;
  std::vector<int> missing(uint64_t sequence) const;

  // After publish: calls `ring(rank)` for every rank that may be asleep waiting for it.
  template <typename Ring>
  void wake_waiting(Ring ring) const {
    std::atomic_thread_fence(
        std::memory_order_seq_cst);  // against ControlPage::in_slots, counted up before the slots are looked at
    for (const Member& member : members_) {
      if (member.control != nullptr && member.control->in_slots.load(std::memory_order_relaxed) != 0) ring(member.rank);
    }
  }

 private:
  struct Slot {
    alignas(64) std::atomic<uint64_t> stamp;  // the sequence number; 0: never used
    Digest digest;
    alignas(32) std::byte payload[kCapacity];
  };
  struct Member {
    int rank;
    const Slot* slots;     // null: not known yet
    ControlPage* control;  // null: this rank itself, or not known yet
  };
  size_t turn(uint64_t sequence) const { return sequence / steps_ % 2; }

  const int rank_;
  const uint64_t steps_;
  std::vector<Member> members_;
  size_t known_ = 1;
  uint64_t last_ended_ = 0;  // its place among the group's operations
  bool retired_ = false;
  Slot* own_ = nullptr;
  uint64_t offset_ = 0;
};

}  // namespace multiring
