// The moves of an operation that have a lossy wire: what is sent is encoded into the lane's scratch, what comes is
// decoded block by block and combined in float32.
//
// Guarded by RankState::mutex; whichever thread drives calls it.
#pragma once

#include <map>
#include <vector>

#include "codec_stream.h"
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
  std::map<uint16_t, std::vector<CodedStream>> streams_;  // of each lane, by the place among the move's peers
  std::vector<float> decoded_;                            // operands of a coded reduction, a little of each
};

}  // namespace multiring
