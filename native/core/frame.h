// What ranks tell each other: one fixed-size frame, the same over shared memory and sockets.
#pragma once

#include <array>
#include <cstdint>

namespace multiring {

// Names one operation of one group; `group` holds (group, generation), `sequence` its place.
struct OperationKey {
  uint64_t group = 0;
  uint64_t sequence = 0;
  auto operator<=>(const OperationKey&) const = default;
};

enum class FrameKind : uint8_t {
  round = 1,  // agreement: note = descriptor digest (16), conflict flag (1)
  data = 2,   // shm: bytes at (offset, length) of the sender's segment, or of its own memory; tcp: `length` bytes
             // of the stream follow, from its byte `offset` on
  taken = 3,  // the receiver took `length` bytes of the stream (shm: and slot is free again)
  fail = 4,   // the operation failed on the sender: offset = rank it lost, slot = LossKind,
              // note = seconds of silence (8), round = whether it waits for a `quiet`
  lost = 5,   // a rank died or left: offset = rank, slot = LossKind
  where = 6,  // the sender waits for this operation: whom does the receiver wait for?
  there = 7,  // answer to where: offset = rank that the answerer waits for (or itself: not arrived)
  reads = 8,  // shm: the sender of this frame can read the receiver's own memory
  mpi_message = 9,    // mpi: the stream's next `length` bytes come as a message tagged `slot`
  granted = 10,  // mpi: the receiver consumed `length` bytes of the stream
  landed = 11,   // mpi: `length` more messages have arrived
  rail = 12,     // tcp: the sender has given up rail `offset` of this link
  control = 13,   // a message outside any operation: `length` bytes come with it; group and sequence are its address
  control_taken = 14,  // `offset` control messages of `length` bytes were taken
  quiet = 15,    // shm: the sender writes no more into the receiver's memory for the operation
};

// silent, unable, aborted: no loss of a rank, only of an operation: one that the rank did not come to, could not go on
// with, or aborted. cut_off: nothing comes from its host any more; it may live, and then it is told.
enum class LossKind : uint32_t { died = 1, left = 2, silent = 3, unable = 4, aborted = 5, cut_off = 6 };

// Without it nothing goes on that it belongs to; a rank that left had ended its part.
inline bool is_death(LossKind kind) { return kind == LossKind::died || kind == LossKind::cut_off; }
inline bool is_loss_of_rank(LossKind kind) { return is_death(kind) || kind == LossKind::left; }

struct Frame {
  uint64_t group = 0;
  uint64_t sequence = 0;
  FrameKind kind{};
  uint8_t round = 0;
  uint16_t channel = 0;
  uint32_t slot = 0;
  uint64_t offset = 0;
  uint64_t length = 0;
  std::array<uint8_t, 24> note{};

  OperationKey key() const { return {group, sequence}; }
};
static_assert(sizeof(Frame) == 64);

}  // namespace multiring
