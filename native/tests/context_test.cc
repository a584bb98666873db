// Tests operations over both engines, mismatches and departures, with ranks as threads of one process. Meant to run
// under TSan and ASan.

#include "core/rank/context.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <numeric>
#include <set>
#include <thread>

#include "core/memory/digest.h"
#include "checks.h"
#include "job.h"

using namespace multiring;
using namespace multiring::checks;

namespace {

// Returns one segment of a direct all_reduce of float32 over a lossy wire.
std::shared_ptr<Program> coded_all_reduce(int rank, int size, uint64_t count, Wire wire) {
  auto program = std::make_shared<Program>(*direct_all_reduce(rank, size, count));
  program->dtype = DType::f32;
  program->lowering = Lowering::none;
  const auto at = [&](uint64_t bytes) {
    return bytes == count * 4 ? bytes : bytes / (kScaledElements * 4) * kScaledElements * 4;
  };
  bool reduced = false;
  for (Move& move : program->moves) {
    const uint64_t end = at(move.source_offset + move.size);
    move.source_offset = move.target_offset = at(move.source_offset);
    move.size = end - move.source_offset;
    move.wire = wire;
    move.keeps_coded = reduced && move.kind == MoveKind::send;
    reduced |= move.kind == MoveKind::reduce;
    if (move.kind != MoveKind::send) continue;
    move.coded_offset = program->scratch_bytes;
    program->scratch_bytes += encoded_bytes(wire, move.size / 4);
  }
  return program;
}

// Sums on arena memory or ordinary memory; `plain`: move by move.
void sums(int size, bool one_host, bool arena, bool plain) {
  Job job(size, one_host, plain);
  job.in_parallel([&](int rank) {
    Context& context = job[rank];
    for (const uint64_t count : {uint64_t{1}, uint64_t{1000}, uint64_t{300000}}) {
      const size_t bytes = count * 4;
      std::vector<int32_t> own(count);
      std::byte* block = arena ? context.own_segment()->allocate(bytes) : nullptr;
      auto* data = arena ? reinterpret_cast<int32_t*>(block) : own.data();
      for (uint64_t turn = 0; turn < 5; ++turn) {
        for (uint64_t i = 0; i < count; ++i) data[i] = static_cast<int32_t>(i) + rank;
        const auto operation = context.post(
            spec_of(rank, size, count * 10 + turn, direct_all_reduce(rank, size, count), data, "sum", one_host), true);
        wait_for(context, operation);
        check(operation->fault() == FaultKind::none, "an all_reduce succeeds");
        bool right = true;
        for (uint64_t i = 0; i < count; ++i) {
          right &= data[i] == static_cast<int32_t>(i) * size + size * (size - 1) / 2;
        }
        check(right, "an all_reduce returns the sum");
        const bool lowered = one_host && !plain && (arena || size > 1);
        const Lowering how = arena ? Lowering::slice : Lowering::staged_slice;
        check(operation->log().size() == (lowered ? 1 : operation->spec().program->moves.size()),
              "every executed move is logged");
        check(operation->log().front().lowering == (lowered ? how : Lowering::none), "the log names the lowering");
      }
      if (arena) context.own_segment()->release(block);
    }
  });
  job.in_parallel([&](int rank) { job[rank].close(5, true); });
}

// Sums over a lossy wire, with values that lose nothing: in each block the largest value is 127 times the scale, and
// all others are multiples of the scale.
void coded_sums(int size, bool one_host, Wire wire) {
  constexpr uint64_t kSegment = 50 * kScaledElements;
  constexpr uint64_t kLast = 30 * kScaledElements + 77;
  constexpr uint32_t kSegments = 40;
  Job job(size, one_host);
  job.in_parallel([&](int rank) {
    Context& context = job[rank];
    std::vector<float> data((kSegments - 1) * kSegment + kLast);
    const auto base = [&](uint64_t i) { return i + 77 < data.size() ? static_cast<float>(i % 255) - 127 : 127.0F; };
    for (uint64_t i = 0; i < data.size(); ++i) data[i] = std::ldexp(base(i), rank);
    const auto program = coded_all_reduce(rank, size, kSegment, wire);
    program->segments = kSegments;
    program->segment_bytes = kSegment * 4;
    program->last = coded_all_reduce(rank, size, kLast, wire);
    auto spec = spec_of(rank, size, 1, program, data.data(), "coded", one_host);
    spec.user_bytes = data.size() * 4;
    const auto operation = context.post(std::move(spec), true);
    wait_for(context, operation);
    check(operation->fault() == FaultKind::none, "a coded all_reduce succeeds");
    bool right = true;
    for (uint64_t i = 0; i < data.size(); ++i) right &= data[i] == base(i) * static_cast<float>((1 << size) - 1);
    check(right, "a coded all_reduce returns the sum");
    check(operation->log().size() == kSegments * program->moves.size(), "all coded moves are logged");
    check(operation->log().front().bytes == encoded_bytes(wire, program->moves.front().size / 4),
          "the log counts the bytes on the wire");
  });
  job.in_parallel([&](int rank) { job[rank].close(5, true); });
}

// Many operations are in flight at once, and two threads wait for them in opposite orders.
void many_in_flight(bool one_host) {
  constexpr int kSize = 3;
  constexpr uint64_t kOperations = 40;
  constexpr uint64_t kCount = 5000;
  Job job(kSize, one_host);
  job.in_parallel([&](int rank) {
    Context& context = job[rank];
    context.keep_timeline(true);
    std::vector<Event> timeline;
    std::atomic<bool> ended{false};
    const auto drain = [&] {
      for (const Event& event : context.take_timeline()) timeline.push_back(event);
    };
    std::thread drains([&] {
      while (!ended) drain();
    });
    std::vector<std::vector<int32_t>> buffers(kOperations, std::vector<int32_t>(kCount, rank + 1));
    std::vector<std::shared_ptr<Operation>> operations;
    for (uint64_t i = 0; i < kOperations; ++i) {
      operations.push_back(context.post(
          spec_of(rank, kSize, i, direct_all_reduce(rank, kSize, kCount), buffers[i].data(), "sum", one_host), false));
    }
    std::thread backwards([&] {
      for (uint64_t i = kOperations; i-- > 0;) wait_for(context, operations[i]);
    });
    for (const auto& operation : operations) wait_for(context, operation);
    backwards.join();
    ended = true;
    drains.join();
    drain();
    context.keep_timeline(false);
    bool right = true;
    for (const auto& buffer : buffers) {
      for (const int32_t value : buffer) right &= value == 6;
    }
    check(right, "concurrent operations do not mix their data");
    std::map<EventKind, uint64_t> kinds;
    std::set<uint64_t> reduced;
    bool ordered = true;
    for (const Event& event : timeline) {
      ++kinds[event.kind];
      ordered &= event.start_ns <= event.end_ns && event.busy_ns <= event.end_ns - event.start_ns;
      if (event.kind == EventKind::reduce) reduced.insert(event.key.sequence);
    }
    check(kinds[EventKind::operation] == kOperations && kinds[EventKind::wait] >= 2 * kOperations,
          "a timeline contains every operation and wait");
    check(reduced.size() == kOperations, "a timeline contains the reductions of every operation");
    check(ordered && context.dropped_from_timeline() == 0, "the times of a timeline are in order");
  });
  job.in_parallel([&](int rank) { job[rank].close(5, true); });
}

void disagreement(bool one_host) {
  Job job(3, one_host);
  job.in_parallel([&](int rank) {
    Context& context = job[rank];
    std::vector<int32_t> data(100, rank);
    const auto operation = context.post(
        spec_of(rank, 3, 1, direct_all_reduce(rank, 3, 100), data.data(), rank == 1 ? "another" : "one", one_host),
        true);
    wait_for(context, operation);
    check(operation->fault() == FaultKind::mismatch, "different descriptors cause a mismatch on every rank");
    check(operation->descriptions().size() == 3, "every rank receives every description");
    check(operation->descriptions().at(1) == "another", "each description belongs to its rank");
    check(data == std::vector<int32_t>(100, rank), "inputs are intact after a mismatch");
    const auto next =
        context.post(spec_of(rank, 3, 2, direct_all_reduce(rank, 3, 100), data.data(), "sum", one_host), true);
    wait_for(context, next);
    check(next->fault() == FaultKind::none && data[0] == 3, "the operation after a mismatch succeeds");
  });
  job.in_parallel([&](int rank) { job[rank].close(5, true); });
}

void departure(bool one_host, bool announce) {
  Job job(3, one_host);
  job.in_parallel([&](int rank) {
    Context& context = job[rank];
    if (rank == 2) {
      context.close(0, announce);
      return;
    }
    const auto operation = context.post(spec_of(rank, 3, 1, nullptr, nullptr, "barrier", one_host), true);
    wait_for(context, operation);
    check(operation->fault() == FaultKind::peer_lost, "a rank that died or left is a lost peer on every rank");
    check(operation->fault_text().find(announce ? "rank 2 left" : "rank 2 died") == 0, "the error names the lost rank");
  });
  job.in_parallel([&](int rank) { job[rank].close(1, true); });
}

// Rank 1 aborts an operation in which rank 0 waits and which rank 2 has not posted yet. Both ranks must report the
// abort and not a stall.
void abort_is_named(bool one_host) {
  Job job(3, one_host);
  const auto post = [&](int rank, uint64_t number) {
    return job[rank].post(spec_of(rank, 3, number, nullptr, nullptr, "barrier", one_host), true);
  };
  const auto waiting = post(0, 1);
  job[1].abort(post(1, 1), 1);
  wait_for(job[0], waiting);
  const auto late = post(2, 1);
  wait_for(job[2], late);
  for (const auto& operation : {waiting, late}) {
    check(operation->fault() == FaultKind::state, "an abort is not reported as a stall");
    check(operation->fault_text() == "rank 1 aborted the group", "the error names the rank that aborted");
  }
  try {
    post(0, 2);
    check(false, "an aborted group rejects new operations");
  } catch (const Fault& fault) {
    check(fault.what() == std::string("the group is unusable: in an earlier operation rank 1 aborted the group"),
          "the rejection names the reason");
  }
  job.in_parallel([&](int rank) { job[rank].close(1, true); });
}

// Rank 2 stops. Rank 1 gives up operation 1 and leaves, while rank 0 is already in operation 2. Rank 0 must name rank
// 2.
void stall_before(bool one_host) {
  Job job(3, one_host);
  const auto post = [&](int rank, uint64_t number, int size) {
    return job[rank].post(spec_of(rank, size, number, nullptr, nullptr, "barrier", one_host), true);
  };
  std::shared_ptr<Operation> first = post(1, 1, 3);
  std::thread leaving([&] {
    job[1].give_up(first, 2);
    check(first->fault() == FaultKind::stall, "an operation that this rank gives up has stalled");
    job[1].close(1, true);
  });
  const auto second = post(0, 2, 3);
  wait_for(job[0], second);
  leaving.join();
  check(second->fault() == FaultKind::stall, "an operation stalls if a member stalled in an earlier one");
  check(second->fault_text().find("nothing came from rank 2") == 0, "the error names the silent rank");
  job[0].close(1, true);
  job[2].close(1, true);
}

}  // namespace

int main() {
  for (const bool one_host : {true, false}) {
    for (const int size : {1, 2, 4}) {
      for (const bool plain : {false, true}) {
        sums(size, one_host, false, plain);
        sums(size, one_host, true, plain);
      }
    }
    coded_sums(2, one_host, Wire::fp16);
    coded_sums(3, one_host, Wire::int8);
    many_in_flight(one_host);
    disagreement(one_host);
    stall_before(one_host);
    abort_is_named(one_host);
    departure(one_host, true);
    departure(one_host, false);
  }
  return result();
}
