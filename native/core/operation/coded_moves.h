// The moves of an operation that use a lossy wire. A send encodes into the lane's scratch memory; a receive decodes
// block by block and combines in float32.
//
// RankState::mutex guards the state; the driving thread calls it.
#pragma once

#include <map>
#include <vector>

#include "kernels/codec_stream.h"
#include "operation_record.h"

namespace multiring {

class CodedMoves {
 public:
  explicit CodedMoves(OperationRecord& operation) : operation_(operation) {}

  void send(Lane& lane, const Move& move);
  bool receive(Lane& lane, const Move& move);  // true if anything moved

 private:
  void combine_some(const Lane& lane, const Move& move, std::byte* target, uint64_t elements);

  OperationRecord& operation_;
  std::map<uint16_t, std::vector<CodedStream>> streams_;  // by lane, then by position among the move's peers
  std::vector<float> decoded_;                            // decoded blocks of the operands of a reduction
};

}  // namespace multiring
