#include "coded_moves.h"

#include <algorithm>

namespace multiring {
namespace {

constexpr uint64_t kEncoded = 128 * 1024;  // number of elements to encode before they are offered to the peers
constexpr uint64_t kDecoded = 1024;  // number of decoded elements per operand; they stay in the level-1 cache
static_assert(kEncoded % kScaledElements == 0 && kDecoded % kScaledElements == 0);

}  // namespace

void CodedMoves::send(Lane& lane, const Move& move) {
  const uint64_t done = lane.progress / sizeof(float);
  const uint64_t some = std::min(kEncoded, move.size / sizeof(float) - done);
  std::byte* from = operation_.address(lane, move.source_space, move.source_offset) + lane.progress;
  std::byte* to = operation_.address(lane, 2, move.coded_offset) + encoded_bytes(move.wire, done);
  encode(move.wire, to, from, some);
  if (move.keeps_coded) decode(move.wire, from, to, some);
  for (const int peer : move.peers) {
    Link& link = operation_.host.link(peer);
    link.offer(operation_.stream_of(lane, move.channel), to, encoded_bytes(move.wire, some));
    link.pump();
  }
  lane.progress += some * sizeof(float);
}

bool CodedMoves::receive(Lane& lane, const Move& move) {
  const StreamKey key = operation_.stream_of(lane, move.channel);
  const uint64_t left = (move.size - lane.progress) / sizeof(float);
  auto& streams = streams_[lane.slot];
  streams.resize(std::max(streams.size(), move.peers.size()));
  uint64_t ready = std::min(kEncoded, left);
  for (size_t i = 0; i < move.peers.size() && ready > 0; ++i) {
    if (move.peers[i] == operation_.rank()) continue;
    ready = std::min(ready, streams[i].ready(move.wire, operation_.host.link(move.peers[i]), key, left, ready));
  }
  if (ready == 0) return false;
  std::byte* target = operation_.address(lane, move.target_space, move.target_offset) + lane.progress;
  const Reducing reducing(operation_);
  if (move.kind == MoveKind::copy) {
    decode(move.wire, target, streams.front().data(), ready);
  } else {
    combine_some(lane, move, target, ready);
  }
  if (operation_.reads_failed_memory(move.peers)) return false;
  for (size_t i = 0; i < move.peers.size(); ++i) {
    if (move.peers[i] != operation_.rank())
      streams[i].consume(move.wire, operation_.host.link(move.peers[i]), key, ready);
  }
  lane.progress += ready * sizeof(float);
  return true;
}

void CodedMoves::combine_some(const Lane& lane, const Move& move, std::byte* target, uint64_t elements) {
  const Program& program = operation_.program();
  const auto& streams = streams_.at(lane.slot);
  const size_t count = move.peers.size();
  decoded_.resize(std::max<size_t>(decoded_.size(), count * kDecoded));
  std::vector<const void*> sources(count);
  for (uint64_t begin = 0; begin < elements; begin += kDecoded) {
    const uint64_t some = std::min(kDecoded, elements - begin);
    for (size_t i = 0; i < count; ++i) {
      if (move.peers[i] == operation_.rank()) {
        sources[i] =
            operation_.address(lane, move.source_space, move.source_offset) + lane.progress + begin * sizeof(float);
        continue;
      }
      float* decoded = decoded_.data() + i * kDecoded;
      decode(move.wire, decoded, streams[i].data() + encoded_bytes(move.wire, begin), some);
      sources[i] = decoded;
    }
    combine(DType::f32, program.op, target + begin * sizeof(float), sources.data(), static_cast<int>(count), some,
            move.last ? program.divisor : 1);
  }
}

}  // namespace multiring
