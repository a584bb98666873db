// The fixed-size message header that ranks exchange. Its layout is the same over shared memory and sockets.
#pragma once

#include <array>
#include <cstdint>

namespace multiring {

// Identifies one operation of one group. `group` encodes the group and its generation; `sequence` is the operation's
// sequence number in the group.
struct OperationKey {
  uint64_t group = 0;
  uint64_t sequence = 0;
  auto operator<=>(const OperationKey&) const = default;
};

enum class FrameKind : uint8_t {
  round = 1,  // a round of the agreement: note = descriptor digest (16 bytes), conflict flag (1 byte)
  data = 2,   // shm: bytes at (offset, length) of the sender's segment or of its ordinary memory;
              // tcp: `length` bytes of the stream follow, starting at stream byte `offset`
  taken = 3,  // the receiver consumed `length` bytes of the stream (shm: staging slot `slot` is free again)
  fail = 4,   // the operation failed on the sender: offset = lost rank, slot = LossKind,
              // note = seconds of silence (8 bytes), round = 1 if the sender waits for a `quiet`
  lost = 5,   // a rank died or left: offset = rank, slot = LossKind
  where = 6,  // the sender waits in this operation and asks which rank the receiver waits for
  there = 7,  // answer to `where`: offset = the rank the answering rank waits for, or its own if it has not arrived
  reads = 8,  // shm: the sender of this frame can read the receiver's ordinary memory
  mpi_message = 9,  // mpi: the stream's next `length` bytes follow as an MPI message with the tag `slot`
  granted = 10,     // mpi: the receiver consumed `length` bytes of the stream
  landed = 11,      // mpi: `length` more messages have arrived
  rail = 12,        // tcp: the sender has stopped using rail `offset` of this link
  control = 13,     // a message outside any operation, with `length` bytes; group and sequence are its address
  control_taken = 14,  // the receiver took `offset` control messages, `length` bytes in all
  quiet = 15,          // shm: the sender no longer writes into the receiver's memory for the operation
};

// Why a rank, or an operation with it, was lost.
//
// `silent`, `unable` and `aborted` lose an operation, not the rank: the rank did not arrive, could not continue, or
// aborted. `cut_off` means that the rank's host has stopped answering. The rank may be alive; then it is informed.
enum class LossKind : uint32_t { died = 1, left = 2, silent = 3, unable = 4, aborted = 5, cut_off = 6 };

// Returns whether every operation with the lost rank must fail. A rank that left has finished its own part.
inline bool is_death(LossKind kind) { return kind == LossKind::died || kind == LossKind::cut_off; }
inline bool is_loss_of_rank(LossKind kind) { return is_death(kind) || kind == LossKind::left; }

// The meaning of the fields depends on `kind`; see FrameKind.
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
