// State shared by the parts of one operation: its specification, its host and its progress.
//
// RankState::mutex guards the state, like all state of an operation.
#pragma once

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "memory/clock.h"
#include "operation_spec.h"
#include "reduction_times.h"

namespace multiring {

// A lane processes segments one after another over its own set of streams. Lanes run concurrently; each waits only for
// the messages of its current segment.
struct Lane {
  uint16_t slot;
  uint32_t segment;
  size_t next = 0;        // index of the current move
  uint64_t progress = 0;  // completed bytes of the current move
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
  // Returns true if the operation has failed on one of the peers; bytes read from that peer may then be invalid.
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
  std::vector<int> partners;  // ranks that exchange messages with this rank in the operation
  std::set<int> failed_peers;  // ranks that reported the operation's failure
  std::byte* scratch = nullptr;
  Clock::time_point agreed{};  // when this rank learned that every rank had arrived
  std::vector<LogEntry> log;
  ReductionTimes reductions;
};

// Records the time from its construction to its destruction as reduction time of the operation.
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

// The most bytes of one step. A small step keeps its sources in cache.
inline constexpr uint64_t kQuantum = 512 * 1024;
// The most bytes of one call of `drive`, after which other operations get their turn.
inline constexpr uint64_t kTurn = 4 * kQuantum;

// Offsets in the `round` field that mark other uses of a round frame.
inline constexpr uint8_t kCompletion = 0x80;  // + round: the sender no longer uses the other ranks' buffers
inline constexpr uint8_t kEager = 0x40;       // + message index: the note carries the bytes of a send
static_assert(kCompletion - kEager == kMostEager);

}  // namespace multiring
