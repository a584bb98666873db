// A Schedule compiled for one rank: the moves that an operation runs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "codec.h"
#include "combine.h"

namespace multiring {

// Enough that every link has work while segments wait for each other's last bytes; each lane costs a stream a peer.
inline constexpr uint32_t kMostLanes = 16;
inline constexpr uint32_t kExplainChannel =
    0xff00;                                // + round of an agreement's second exchange; moves use channels below
inline constexpr uint8_t kMostEager = 64;  // messages from one rank to another on a channel, where they travel as notes

enum class MoveKind : uint8_t { send = 0, copy = 1, reduce = 2 };

// One move of a Schedule, with extents resolved to bytes. Ranks are world ranks.
struct Move {
  MoveKind kind{};
  bool last = false;  // reduce: every contribution is in, so an average divides here
  uint16_t channel = 0;
  uint8_t source_space = 0;  // 0 input, 1 output, 2 scratch
  uint8_t target_space = 0;
  uint64_t source_offset = 0;  // bytes
  uint64_t target_offset = 0;
  uint64_t size = 0;  // bytes, before they are coded
  std::vector<int> peers;
  Wire wire = Wire::none;     // how what it sends or takes is coded; then the type is f32
  bool keeps_coded = false;   // send: leaves at the source what its peers decode
  uint64_t coded_offset = 0;  // send: where in scratch its encoding goes
};

inline uint64_t wire_bytes(const Move& move, uint64_t size) {  // what `size` bytes of a move are while they travel
  return move.wire == Wire::none ? size : encoded_bytes(move.wire, size / sizeof(float));
}

// How a program may run other than move by move; each has a differential test against that.
enum class Lowering : uint8_t {
  none,
  // A direct all_reduce whose buffers all lie in arenas: each rank combines its slice of all buffers and writes the
  // result into all of them. One pass over the memory, where the moves make two.
  slice,
  // The same on a rank whose buffer is ordinary memory, and small: the others work on a copy in its segment.
  staged_slice,
  // An all_reduce by exchange of buffers that fit the group's slots: publish, combine everybody's. One step, and no
  // agreement before it: the slots hold the descriptors too.
  exchange,
  // The same where ranks are on several hosts: what a move sends travels with the agreement's note, copied, so that no
  // agreement comes before. Only moves that make a part complete write the user's buffer, once every rank is known to
  // mean the same.
  notes,
};

// What the executor did, move by move; `index` is the move's place in the program of its segment.
struct LogEntry {
  Lowering lowering;  // of the whole program; then, but for notes, `index` is the move that says which extents
  uint32_t segment;
  uint32_t index;
  uint64_t bytes;  // bytes that really went through it, summed over peers
};

// A Schedule compiled for one rank, one size and one type; immutable, shared by operations.
//
// With several segments the moves are those of one: the buffer is that many pieces, `segment_bytes` apart, and each
// goes through the whole schedule by itself. `last` are the moves of the last piece where it is of another size.
struct Program {
  std::vector<Move> moves;
  uint32_t segments = 1;
  uint64_t segment_bytes = 0;
  std::shared_ptr<const Program> last;
  uint16_t channels = 1;
  uint64_t scratch_bytes = 0;  // of one segment
  DType dtype = DType::u8;
  ReduceOp op = ReduceOp::sum;
  uint64_t divisor = 1;
  Lowering lowering = Lowering::none;

  uint32_t lanes() const {  // how many segments run side by side
    return std::min({segments, kMostLanes, kExplainChannel / uint32_t{channels}});
  }
  // Once all moves are in: counts their channels, and checks the lowering.
  void complete();
  // Throws Fault::argument unless the lowering does what the moves do: that those are proven is then proof of both.
  void check_lowering() const;
};

}  // namespace multiring
