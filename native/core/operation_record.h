// What the parts of one operation share: what it is, where it runs, what it has done.
//
// As all of an operation, guarded by the mutex of its rank (RankState::mutex).
#pragma once

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "clock.h"
#include "operation_spec.h"
#include "reduction_times.h"

namespace multiring {

// Segments one after the other that share a line of streams; lanes run side by side, and wait for nobody but their own
// segment's messages.
struct Lane {
  uint16_t slot;
  uint32_t segment;
  size_t next = 0;        // move
  uint64_t progress = 0;  // bytes of it
};

struct OperationRecord {
  OperationRecord(OperationSpec from, OperationHost& at) : spec(std::move(from)), host(at) {}

  const Program& program() const { return *spec.program; }
  OperationKey key() const { return spec.key; }
  int rank() const { return host.rank(); }
  std::byte* address(const Lane& lane, uint8_t space, uint64_t offset) const {
    if (space == 2) return scratch + lane.slot * spec.program->scratch_bytes + offset;
    return spec.bases[space] + lane.segment * spec.program->segment_bytes + offset;
  }
  StreamKey stream_of(const Lane& lane, uint16_t channel) const {
    return {spec.key, static_cast<uint16_t>(lane.slot * spec.program->channels + channel)};
  }
  // Whether what came from one of them may be no part of the operation, because that one has failed in it.
  bool reads_failed_memory(const std::vector<int>& peers) const {
    return std::any_of(peers.begin(), peers.end(), [this](int peer) {
      return peer != rank() && (host.link(peer).has_failed(spec.key) || failed_peers.contains(peer));
    });
  }
  void open_scratch() {
    if (program().scratch_bytes > 0) scratch = host.segment().allocate(program().lanes() * program().scratch_bytes);
  }
  void close_scratch() {
    if (scratch != nullptr) host.segment().release(std::exchange(scratch, nullptr));
  }

  OperationSpec spec;
  OperationHost& host;
  std::vector<int> partners;  // ranks this one talks to directly
  std::set<int> failed_peers;  // where it has failed, as they told
  std::byte* scratch = nullptr;
  Clock::time_point agreed{};  // when every rank had come to it
  std::vector<LogEntry> log;
  ReductionTimes reductions;
};

// As long as it lives this rank reduces for the operation.
class Reducing {
 public:
  explicit Reducing(OperationRecord& operation)
      : operation_(operation), start_(operation.host.times_work() ? Clock::now() : Clock::time_point{}) {}
  ~Reducing() {
    if (start_ != Clock::time_point{}) operation_.reductions.add(start_, Clock::now());
  }
  Reducing(const Reducing&) = delete;
  Reducing& operator=(const Reducing&) = delete;

 private:
  OperationRecord& operation_;
  const Clock::time_point start_;
};

inline std::vector<const Move*> reductions_of(const Program& program) {
  std::vector<const Move*> found;
  for (const Move& move : program.moves) {
    if (move.kind == MoveKind::reduce) found.push_back(&move);
  }
  return found;
}

// Bytes one call of drive handles before it lets others have a turn; also keeps sources in cache.
inline constexpr uint64_t kQuantum = 512 * 1024;
inline constexpr uint64_t kTurn = 4 * kQuantum;

// What a round's frame says besides the number of the round.
inline constexpr uint8_t kCompletion = 0x80;  // + round: the sender is done with everybody's buffers
inline constexpr uint8_t kEager = 0x40;       // + its place on its line: it brings what a move sends
static_assert(kCompletion - kEager == kMostEager);

}  // namespace multiring
