// The compiled form of a Schedule: the moves that one rank executes in an operation.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/codec.h"
#include "kernels/combine.h"

namespace multiring {

// Enough lanes to keep every link busy while some segments wait for their last bytes. Each lane costs one stream per
// peer.
inline constexpr uint32_t kMostLanes = 16;
// The second exchange of an agreement uses this channel plus the number of the round. Moves use lower channels.
inline constexpr uint32_t kExplainChannel = 0xff00;
inline constexpr uint8_t kMostEager = 64;  // most messages per peer and channel that travel as notes

enum class MoveKind : uint8_t { send = 0, copy = 1, reduce = 2 };

// One move of a Schedule, with its extents converted to bytes. Ranks are world ranks.
struct Move {
  MoveKind kind{};
  bool last = false;  // reduce: this move completes the sum, so an average divides here
  uint16_t channel = 0;
  uint8_t source_space = 0;  // 0 input, 1 output, 2 scratch
  uint8_t target_space = 0;
  uint64_t source_offset = 0;  // bytes
  uint64_t target_offset = 0;
  uint64_t size = 0;  // bytes before encoding
  std::vector<int> peers;
  Wire wire = Wire::none;     // encoding of the transferred bytes; a lossy wire requires f32
  bool keeps_coded = false;   // send: replaces the source by the values that the peers decode
  uint64_t coded_offset = 0;  // send: offset of the encoded bytes in scratch memory
};

// Returns the number of bytes that `size` bytes of the move occupy on the wire.
inline uint64_t wire_bytes(const Move& move, uint64_t size) {
  return move.wire == Wire::none ? size : encoded_bytes(move.wire, size / sizeof(float));
}

// Faster ways to run a program than move by move. A differential test compares each with the run move by move.
enum class Lowering : uint8_t {
  none,
  // A direct all_reduce whose buffers all lie in shared segments. Each rank combines its slice of all buffers and
  // writes the result into all of them. This takes one pass over the memory; the moves take two.
  slice,
  // `slice` on a rank whose buffer is small and in ordinary memory: the other ranks work on a copy in the segment.
  staged_slice,
  // An all_reduce of buffers that fit the group's slots: each rank publishes its buffer and combines all buffers. This
  // takes one step without an agreement before it, because the slots also hold the descriptors.
  exchange,
  // `exchange` for ranks on several hosts: the bytes of each send travel as a copy with the agreement's note, so no
  // agreement precedes them. Only moves that complete a part write the user's buffer. By then every rank is known to
  // have posted the same operation.
  notes,
};

// One executed move. `index` is the move's position in its segment's program.
struct LogEntry {
  // How the whole program ran. With `slice`, `staged_slice` and `exchange`, `index` is the reduction that names the
  // extents.
  Lowering lowering;
  uint32_t segment;
  uint32_t index;
  uint64_t bytes;  // bytes actually transferred, summed over peers
};

// A Schedule compiled for one rank, one size and one type. It is immutable, and operations share it.
//
// A program may cut the buffer into several segments, `segment_bytes` apart. `moves` then describes one segment, and
// each segment runs the whole schedule independently. `last` holds the moves of the last segment if its size differs.
struct Program {
  std::vector<Move> moves;
  uint32_t segments = 1;
  uint64_t segment_bytes = 0;
  std::shared_ptr<const Program> last;
  uint16_t channels = 1;
  uint64_t scratch_bytes = 0;  // scratch memory of one segment
  DType dtype = DType::u8;
  ReduceOp op = ReduceOp::sum;
  uint64_t divisor = 1;
  Lowering lowering = Lowering::none;

  uint32_t lanes() const {  // the number of segments that run concurrently
    return std::min({segments, kMostLanes, kExplainChannel / uint32_t{channels}});
  }
  // Call this after adding all moves. It counts the channels and checks the lowering.
  void complete();
  // Throws Fault::argument unless the lowering does the same as the moves. The proof of the moves then covers both.
  void check_lowering() const;
};

}  // namespace multiring
