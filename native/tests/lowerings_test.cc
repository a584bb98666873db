// Tests the lowerings for small operations, which need no agreement. Meant to run under TSan and ASan.

#include "core/rank/context.h"

#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <numeric>
#include <thread>

#include "checks.h"
#include "job.h"

using namespace multiring;
using namespace multiring::checks;

namespace {

// Returns an all_reduce of `count` int32 in place: copy to scratch memory, send the copy to all ranks, combine all
// copies. The channels have parts of different sizes.
std::shared_ptr<const Program> exchange_all_reduce(int rank, int size, uint64_t count,
                                                   Lowering lowering = Lowering::exchange, uint16_t channels = 1) {
  auto program = std::make_shared<Program>();
  program->dtype = DType::i32;
  program->lowering = lowering;
  program->channels = channels;
  program->scratch_bytes = program->segment_bytes = count * 4;
  std::vector<int> all;
  std::vector<int> others;
  for (int peer = 0; peer < size; ++peer) {
    all.push_back(peer);
    if (peer != rank) others.push_back(peer);
  }
  const auto at = [&](int channel) { return (count >> (channels - channel)) * 4; };
  const auto move = [&](MoveKind kind, uint8_t from, uint8_t to, const std::vector<int>& peers) {
    for (uint16_t channel = 0; channel < channels; ++channel) {
      const uint64_t start = channel == 0 ? 0 : at(channel);
      program->moves.push_back({.kind = kind,
                                .last = kind == MoveKind::reduce,
                                .channel = channel,
                                .source_space = from,
                                .target_space = to,
                                .source_offset = start,
                                .target_offset = start,
                                .size = at(channel + 1) - start,
                                .peers = peers});
    }
  };
  move(MoveKind::copy, 1, 2, {rank});
  move(MoveKind::send, 2, 0, others);
  move(MoveKind::reduce, 2, 1, all);
  program->check_lowering();
  return program;
}

// Runs small operations. Each rank decides at random whether it uses the slots or the ordinary way.
void every_way_of_meeting(int size) {
  constexpr uint64_t kOperations = 600;
  constexpr uint64_t kCount = 50;
  Job job(size, true, false, false);
  job.in_parallel([&](int rank) {
    Context& context = job[rank];
    std::vector<int> members(static_cast<size_t>(size));
    std::iota(members.begin(), members.end(), 0);
    const auto slots = std::make_shared<SharedSlots>(rank, members, 1, context.own_segment());
    const auto program = exchange_all_reduce(rank, size, kCount);
    std::atomic<uint64_t> sequence{0};
    uint32_t dice = static_cast<uint32_t>(rank) + 1;
    bool right = true;
    std::vector<std::vector<int32_t>> buffers(kOperations, std::vector<int32_t>(kCount));
    std::vector<std::shared_ptr<Operation>> later;
    for (uint64_t i = 0; i < kOperations; ++i) {
      auto& data = buffers[i];
      std::fill(data.begin(), data.end(), static_cast<int32_t>(i) + rank);
      dice = dice * 1664525 + 1013904223;
      const bool waits = i > kOperations / 2 || (dice >> 16) % 4 != 0;  // in the second half, all ranks use the slots
      auto spec = spec_of(rank, size, 0, program, data.data(), "sum", true);
      spec.slots = slots;
      spec.meets = waits;
      Context::MeetResult attempt;
      if (waits) attempt = context.meet(spec, {1, sequence, 1}, reinterpret_cast<std::byte*>(data.data()));
      if (attempt.is_done) continue;
      if (!attempt.operation) {
        spec.key.sequence = ++sequence;
        attempt.operation = context.post(std::move(spec), waits);
      }
      if (waits) {
        wait_for(context, attempt.operation);
      } else {
        later.push_back(attempt.operation);
      }
    }
    for (const auto& operation : later) wait_for(context, operation);
    for (uint64_t i = 0; i < kOperations; ++i) {
      for (const int32_t value : buffers[i]) right &= value == static_cast<int32_t>(i) * size + size * (size - 1) / 2;
    }
    check(right, "every combination of ways returns the sum");
    check(slots->knows_all(), "the slots of all ranks are known in the end");
  });
  job.in_parallel([&](int rank) { job[rank].close(5, true); });
}

// Runs small operations over several channels, whose messages travel as notes. Also tests that the ranks turn back to
// the agreement if a rank has another descriptor or does not send notes.
void eager_sums(uint16_t channels) {
  constexpr int kSize = 3;
  constexpr uint64_t kCount = 100;
  Job job(kSize, false, false, true, 2);
  job.in_parallel([&](int rank) {
    Context& context = job[rank];
    const auto program = exchange_all_reduce(rank, kSize, kCount, Lowering::notes, channels);
    std::vector<int32_t> data(kCount);
    const auto post = [&](uint64_t sequence, const char* description, std::shared_ptr<const Program> what) {
      for (uint64_t i = 0; i < kCount; ++i) data[i] = static_cast<int32_t>(i) + rank;
      const auto operation =
          context.post(spec_of(rank, kSize, sequence, std::move(what), data.data(), description), true);
      wait_for(context, operation);
      return operation;
    };
    const auto holds = [&](int32_t factor, int32_t addend) {
      for (uint64_t i = 0; i < kCount; ++i) {
        if (data[i] != static_cast<int32_t>(i) * factor + addend) return false;
      }
      return true;
    };
    for (uint64_t turn = 0; turn < 10; ++turn) {
      const auto operation = post(3 * turn, "sum", program);
      check(operation->fault() == FaultKind::none && holds(kSize, 3), "messages of every channel are summed");
      const auto& log = operation->log();
      check(log.size() == program->moves.size() && log.front().lowering == Lowering::notes, "each move used a note");
      const auto wrong = post(3 * turn + 1, rank == 1 ? "another" : "one", program);
      check(wrong->fault() == FaultKind::mismatch && holds(1, rank),
            "another descriptor causes a mismatch, and all buffers are intact");
      const auto plain = post(3 * turn + 2, "plain",
                              rank == 2 ? exchange_all_reduce(rank, kSize, kCount, Lowering::none, channels) : program);
      check(plain->fault() == FaultKind::none && holds(kSize, 3), "ranks also sum if one sends no notes");
      check(plain->log().front().lowering == Lowering::none, "the log shows that the program ran move by move");
    }
  });
  job.in_parallel([&](int rank) { job[rank].close(5, true); });
}

// An operation begins when its rank publishes in the slots, because the other ranks may end it from then on.
void posted_as_published() {
  Job job(2, true, false, false);
  std::atomic<bool> rests{false};  // rank 1 sends no more frames, which would end the spinning of rank 0
  std::atomic<bool> has_met{false};
  job.in_parallel([&](int rank) {
    Context& context = job[rank];
    const auto slots = std::make_shared<SharedSlots>(rank, std::vector<int>{0, 1}, 1, context.own_segment());
    std::vector<int32_t> data(10, rank);
    std::atomic<uint64_t> sequence{1};
    auto spec = spec_of(rank, 2, sequence, exchange_all_reduce(rank, 2, 10), data.data(), "sum", true);
    spec.slots = slots;
    wait_for(context, context.post(spec, true));  // now the slots are known
    if (rank == 1) {
      rests = true;
      while (!has_met) std::this_thread::yield();
      spec.key.sequence = 2;
      wait_for(context, context.post(spec, true));
    } else {
      while (!rests) std::this_thread::yield();
      spec.meets = true;
      Context::MeetResult attempt;
      while (!attempt.operation)
        attempt = context.meet(spec, {1, sequence, 1}, reinterpret_cast<std::byte*>(data.data()));
      check(Clock::now() - attempt.operation->posted >= std::chrono::microseconds(20),
            "an operation is as old as its published contribution");
      has_met = true;
      wait_for(context, attempt.operation);
    }
    check(data == std::vector<int32_t>(10, 2), "the operation returns the sum");
  });
  job.in_parallel([&](int rank) { job[rank].close(5, true); });
}

// A mismatch in the slots is reported, and later operations succeed.
void disagreement_in_slots() {
  Job job(3, true, false, false);
  job.in_parallel([&](int rank) {
    Context& context = job[rank];
    const auto slots = std::make_shared<SharedSlots>(rank, std::vector<int>{0, 1, 2}, 1, context.own_segment());
    std::vector<int32_t> data(10, rank);
    const auto post = [&](uint64_t sequence, const char* description, bool meets) {
      auto spec = spec_of(rank, 3, sequence, exchange_all_reduce(rank, 3, 10), data.data(), description, true);
      spec.slots = slots;
      spec.meets = meets;
      const auto operation = context.post(std::move(spec), true);
      wait_for(context, operation);
      return operation;
    };
    check(post(1, "sum", false)->fault() == FaultKind::none && data[0] == 3, "the first operation agrees and succeeds");
    for (const bool meets : {true, false}) {
      data.assign(10, rank);
      const auto wrong = post(meets ? 2 : 3, rank == 1 ? "another" : "one", meets || rank != 1);
      check(wrong->fault() == FaultKind::mismatch && wrong->descriptions().at(1) == "another",
            "a mismatch in the slots is reported");
      check(data == std::vector<int32_t>(10, rank), "inputs are intact after a mismatch in the slots");
    }
    check(post(4, "sum", true)->fault() == FaultKind::none && data[0] == 3, "the next operation succeeds in the slots");
  });
  job.in_parallel([&](int rank) { job[rank].close(5, true); });
}

}  // namespace

int main() {
  every_way_of_meeting(2);
  every_way_of_meeting(4);
  posted_as_published();
  disagreement_in_slots();
  for (const uint16_t channels : {1, 3}) eager_sums(channels);
  return result();
}
