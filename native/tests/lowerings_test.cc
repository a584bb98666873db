// Small operations, as the lowerings that need no agreement run them; made for TSan and ASan.

#include "core/context.h"

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

// Copy aside, send the copy to all, combine everybody's, of `count` int32 in place; the channels have parts of unequal
// size.
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

// Small operations, each rank meeting in the slots or telling the ordinary way as its own dice fall.
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
      const bool waits = i > kOperations / 2 || (dice >> 16) % 4 != 0;  // the second half is met by everyone
      auto spec = spec_of(rank, size, 0, program, data.data(), "sum", true);
      spec.slots = slots;
      spec.meets = waits;
      Context::Attempt attempt;
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
    check(right, "every way of meeting gives the sum");
    check(slots->knows_all(), "and the slots were known");
  });
  job.in_parallel([&](int rank) { job[rank].close(5, true); });
}

// Small operations over several channels, whose moves travel as notes; also where the ranks turn back to agreeing: for
// one that means something else, and for one that has nothing to note.
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
      check(operation->fault() == FaultKind::none && holds(kSize, 3), "notes of every channel are summed");
      const auto& log = operation->log();
      check(log.size() == program->moves.size() && log.front().lowering == Lowering::notes, "each move by its note");
      const auto wrong = post(3 * turn + 1, rank == 1 ? "another" : "one", program);
      check(wrong->fault() == FaultKind::mismatch && holds(1, rank),
            "what somebody else means is told, all buffers intact");
      const auto plain = post(3 * turn + 2, "plain",
                              rank == 2 ? exchange_all_reduce(rank, kSize, kCount, Lowering::none, channels) : program);
      check(plain->fault() == FaultKind::none && holds(kSize, 3), "who finds a rank that does not note sums its way");
      check(plain->log().front().lowering == Lowering::none, "move by move");
    }
  });
  job.in_parallel([&](int rank) { job[rank].close(5, true); });
}

// An operation begins with what its rank shows in the slots, whatever it does then: the others may end it meanwhile.
void posted_as_published() {
  Job job(2, true, false, false);
  std::atomic<bool> rests{false};  // rank 1: nothing more comes from it, which would end the other's spinning
  std::atomic<bool> has_met{false};
  job.in_parallel([&](int rank) {
    Context& context = job[rank];
    const auto slots = std::make_shared<SharedSlots>(rank, std::vector<int>{0, 1}, 1, context.own_segment());
    std::vector<int32_t> data(10, rank);
    std::atomic<uint64_t> sequence{1};
    auto spec = spec_of(rank, 2, sequence, exchange_all_reduce(rank, 2, 10), data.data(), "sum", true);
    spec.slots = slots;
    wait_for(context, context.post(spec, true));  // the slots are known now
    if (rank == 1) {
      rests = true;
      while (!has_met) std::this_thread::yield();
      spec.key.sequence = 2;
      wait_for(context, context.post(spec, true));
    } else {
      while (!rests) std::this_thread::yield();
      spec.meets = true;
      Context::Attempt attempt;
      while (!attempt.operation)
        attempt = context.meet(spec, {1, sequence, 1}, reinterpret_cast<std::byte*>(data.data()));
      check(Clock::now() - attempt.operation->posted >= std::chrono::microseconds(20),
            "an operation is as old as what it showed");
      has_met = true;
      wait_for(context, attempt.operation);
    }
    check(data == std::vector<int32_t>(10, 2), "and sums");
  });
  job.in_parallel([&](int rank) { job[rank].close(5, true); });
}

// In the slots too, ranks that mean different things are told, and go on.
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
    check(post(1, "sum", false)->fault() == FaultKind::none && data[0] == 3, "the first is agreed on");
    for (const bool meets : {true, false}) {
      data.assign(10, rank);
      const auto wrong = post(meets ? 2 : 3, rank == 1 ? "another" : "one", meets || rank != 1);
      check(wrong->fault() == FaultKind::mismatch && wrong->descriptions().at(1) == "another",
            "a disagreement in slots is told");
      check(data == std::vector<int32_t>(10, rank), "inputs are intact after it");
    }
    check(post(4, "sum", true)->fault() == FaultKind::none && data[0] == 3, "and the next operation meets");
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
