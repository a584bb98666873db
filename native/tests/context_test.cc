// Ranks as threads of one process: operations over both engines, disagreement, departure; made for TSan and ASan.

#include "core/context.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <numeric>
#include <set>
#include <thread>

#include "core/digest.h"
#include "checks.h"
#include "job.h"

using namespace multiring;
using namespace multiring::checks;

namespace {

// The same of float32 that are coded on their way, of one segment.
std::shared_ptr<Program> coded_all_reduce(int rank, int size, uint64_t count, Wire wire) {
  auto program = std::make_shared<Program>(*direct_all_reduce(rank, size, count));
  program->dtype = DType::f32;
  program->lowering = Lowering::none;
  const auto at = [&](uint64_t bytes) { return bytes == count * 4 ? bytes : bytes / (kScaledElements * 4) * kScaledElements * 4; };
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

// Copy aside, send the copy to all, combine everybody's, of `count` int32 in place; the channels have parts of unequal size.
std::shared_ptr<const Program> exchange_all_reduce(int rank, int size, uint64_t count, Lowering lowering = Lowering::exchange,
                                                   uint16_t channels = 1) {
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
      program->moves.push_back({.kind = kind, .last = kind == MoveKind::reduce, .channel = channel, .source_space = from,
                                .target_space = to, .source_offset = start, .target_offset = start,
                                .size = at(channel + 1) - start, .peers = peers});
    }
  };
  move(MoveKind::copy, 1, 2, {rank});
  move(MoveKind::send, 2, 0, others);
  move(MoveKind::reduce, 2, 1, all);
  program->check_lowering();
  return program;
}

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
        check(operation->fault() == FaultKind::none, "an all_reduce ends well");
        bool right = true;
        for (uint64_t i = 0; i < count; ++i) {
          right &= data[i] == static_cast<int32_t>(i) * size + size * (size - 1) / 2;
        }
        check(right, "an all_reduce sums");
        const bool lowered = one_host && !plain && (arena || size > 1);
        const Lowering how = arena ? Lowering::slice : Lowering::staged_slice;
        check(operation->log().size() == (lowered ? 1 : operation->spec().program->moves.size()), "all that ran is logged");
        check(operation->log().front().lowering == (lowered ? how : Lowering::none), "as what it ran");
      }
      if (arena) context.own_segment()->release(block);
    }
  });
  job.in_parallel([&](int rank) { job[rank].close(5, true); });
}

// Numbers that lose nothing: in each block the largest is 127 times the scale, and the others whole multiples of it.
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
    check(operation->fault() == FaultKind::none, "a coded all_reduce ends well");
    bool right = true;
    for (uint64_t i = 0; i < data.size(); ++i) right &= data[i] == base(i) * static_cast<float>((1 << size) - 1);
    check(right, "a coded all_reduce sums");
    check(operation->log().size() == kSegments * program->moves.size(), "all coded moves are logged");
    check(operation->log().front().bytes == encoded_bytes(wire, program->moves.front().size / 4), "by what travelled");
  });
  job.in_parallel([&](int rank) { job[rank].close(5, true); });
}

// Many operations in flight at once, waited for from two threads in opposite orders.
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
    check(right, "operations in flight together do not mix");
    std::map<Event::Kind, uint64_t> kinds;
    std::set<uint64_t> reduced;
    bool ordered = true;
    for (const Event& event : timeline) {
      ++kinds[event.kind];
      ordered &= event.start_ns <= event.end_ns && event.busy_ns <= event.end_ns - event.start_ns;
      if (event.kind == Event::Kind::reduce) reduced.insert(event.key.sequence);
    }
    check(kinds[Event::Kind::operation] == kOperations && kinds[Event::Kind::wait] >= 2 * kOperations, "a timeline has every operation and wait");
    check(reduced.size() == kOperations, "a timeline has every operation's reductions");
    check(ordered && context.dropped_from_timeline() == 0, "a timeline's times are in order");
  });
  job.in_parallel([&](int rank) { job[rank].close(5, true); });
}

void disagreement(bool one_host) {
  Job job(3, one_host);
  job.in_parallel([&](int rank) {
    Context& context = job[rank];
    std::vector<int32_t> data(100, rank);
    const auto operation = context.post(
        spec_of(rank, 3, 1, direct_all_reduce(rank, 3, 100), data.data(), rank == 1 ? "another" : "one", one_host), true);
    wait_for(context, operation);
    check(operation->fault() == FaultKind::mismatch, "a disagreement is a mismatch on every rank");
    check(operation->descriptions().size() == 3, "every rank hears every description");
    check(operation->descriptions().at(1) == "another", "the description is the rank's own");
    check(data == std::vector<int32_t>(100, rank), "inputs are intact after a mismatch");
    const auto next = context.post(spec_of(rank, 3, 2, direct_all_reduce(rank, 3, 100), data.data(), "sum", one_host), true);
    wait_for(context, next);
    check(next->fault() == FaultKind::none && data[0] == 3, "the next operation works");
  });
  job.in_parallel([&](int rank) { job[rank].close(5, true); });
}

// Small operations, each rank meeting in the slots or telling the ordinary way as its own dice fall.
void meets(int size) {
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

// Small operations over several channels, whose moves travel as notes; also where the ranks turn back to agreeing: for one
// that means something else, and for one that has nothing to note.
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
      const auto operation = context.post(spec_of(rank, kSize, sequence, std::move(what), data.data(), description), true);
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
      check(wrong->fault() == FaultKind::mismatch && holds(1, rank), "what somebody else means is told, all buffers intact");
      const auto plain = post(3 * turn + 2, "plain", rank == 2 ? exchange_all_reduce(rank, kSize, kCount, Lowering::none, channels) : program);
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
      while (!attempt.operation) attempt = context.meet(spec, {1, sequence, 1}, reinterpret_cast<std::byte*>(data.data()));
      check(Clock::now() - attempt.operation->posted >= std::chrono::microseconds(20), "an operation is as old as what it showed");
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
      check(wrong->fault() == FaultKind::mismatch && wrong->descriptions().at(1) == "another", "a disagreement in slots is told");
      check(data == std::vector<int32_t>(10, rank), "inputs are intact after it");
    }
    check(post(4, "sum", true)->fault() == FaultKind::none && data[0] == 3, "and the next operation meets");
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
    check(operation->fault() == FaultKind::peer_lost, "a rank that is gone is a lost peer to all");
    check(operation->fault_text().find(announce ? "rank 2 left" : "rank 2 died") == 0, "and it is named");
  });
  job.in_parallel([&](int rank) { job[rank].close(1, true); });
}

// Rank 1 aborts an operation that rank 0 waits in and rank 2 has not come to: both are told that, and nothing of silence.
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
    check(operation->fault() == FaultKind::state, "an abort is no silence");
    check(operation->fault_text() == "rank 1 aborted the group", "and who aborted is named");
  }
  try {
    post(0, 2);
    check(false, "an aborted group takes no more operations");
  } catch (const Fault& fault) {
    check(fault.what() == std::string("the group is unusable: in an earlier operation rank 1 aborted the group"), "and says why");
  }
  job.in_parallel([&](int rank) { job[rank].close(1, true); });
}

// Rank 2 stops; rank 1 gives the first operation up, which rank 0 has ended, and leaves: rank 0 is to name rank 2.
void stall_before(bool one_host) {
  Job job(3, one_host);
  const auto post = [&](int rank, uint64_t number, int size) {
    return job[rank].post(spec_of(rank, size, number, nullptr, nullptr, "barrier", one_host), true);
  };
  std::shared_ptr<Operation> first = post(1, 1, 3);
  std::thread leaving([&] {
    job[1].give_up(first, 2);
    check(first->fault() == FaultKind::stall, "who gives up has stalled");
    job[1].close(1, true);
  });
  const auto second = post(0, 2, 3);
  wait_for(job[0], second);
  leaving.join();
  check(second->fault() == FaultKind::stall, "an operation after one in which a member stalled has stalled, too");
  check(second->fault_text().find("nothing came from rank 2") == 0, "and names whom that member waited for");
  job[0].close(1, true);
  job[2].close(1, true);
}

// Between what they carry, rails rest for about their time-out: what was sent a moment before a look has not been silent
// since the look before, at which something had been sent a moment before, too.
void rests_over_rails() {
  constexpr uint64_t kCount = 3;
  Job job(2, false, false, false, 2);
  for (uint64_t turn = 0; turn < 12; ++turn) {
    job.in_parallel([&](int rank) {
      std::vector<int32_t> data(kCount, rank);
      // Not waited for: the thread that looks is the one that sends, so that it looks just after.
      const auto operation = job[rank].post(spec_of(rank, 2, turn, direct_all_reduce(rank, 2, kCount, 2), data.data(), "sum"), false);
      std::this_thread::sleep_for(std::chrono::milliseconds(turn < 6 ? 250 : 500));
      wait_for(job[rank], operation);
      check(operation->fault() == FaultKind::none, "an all_reduce after a rest ends well");
    });
  }
  for (int rank = 0; rank < 2; ++rank) {
    for (const RailStatus& rail : job[rank].rails()) check(rail.is_up, "a rail that rests is not given up");
  }
  job.in_parallel([&](int rank) { job[rank].close(5, true); });
}

// Sums over two rails; from operation `cut_before` on, one of them is silent.
void sums_over_rails(int size, uint64_t cut_before, int cut_rail) {
  constexpr uint64_t kOperations = 8;
  constexpr uint64_t kCount = 600000;
  // Part 1 alone travels on rail 1, from and to rank 1.
  const auto carries = [](int rail, int rank, int peer) { return rail == 0 || rank == 1 || peer == 1; };
  Job job(size, false, false, false, 2);
  for (uint64_t turn = 0; turn < kOperations; ++turn) {
    if (turn == cut_before) cut(cut_rail);
    job.in_parallel([&](int rank) {
      std::vector<int32_t> data(kCount, rank + static_cast<int>(turn));
      const auto operation =
          job[rank].post(spec_of(rank, size, turn, direct_all_reduce(rank, size, kCount, 2), data.data(), "sum"), true);
      wait_for(job[rank], operation);
      check(operation->fault() == FaultKind::none, "an all_reduce over rails ends well");
      const int32_t sum = size * (size - 1) / 2 + size * static_cast<int>(turn);
      check(data == std::vector<int32_t>(kCount, sum), "an all_reduce over rails sums");
    });
  }
  if (cut_before < kOperations) {
    std::map<std::pair<int, int>, bool> lost;
    const int users = cut_rail == 0 ? size * (size - 1) : 2 * (size - 1);
    while (lost.size() < static_cast<size_t>(users)) {  // the news comes late
      for (int rank = 0; rank < size; ++rank) {
        for (const RailLoss& loss : job[rank].take_rail_losses()) {
          check(loss.rail == cut_rail, "the rail that was cut is named");
          if (carries(cut_rail, rank, loss.peer)) lost[{rank, loss.peer}] = true;
        }
      }
      std::this_thread::yield();
    }
  }
  for (int rank = 0; rank < size; ++rank) {
    const auto rails = job[rank].rails();
    check(rails.size() == static_cast<size_t>(2 * (size - 1)), "every rail to every rank is listed");
    for (const RailStatus& rail : rails) {
      const bool is_cut = cut_before < kOperations && rail.rail == cut_rail;
      // Between others, what is lost with the cut may be the answer to the handshake's last words, or nothing.
      if (is_cut && !carries(cut_rail, rank, rail.peer)) continue;
      check(rail.is_up == !is_cut, "and whether it is used");
    }
    check(job[rank].losses().empty(), "no rank is lost with a rail");
  }
  job.in_parallel([&](int rank) { job[rank].close(5, true); });
}

void allocator() {
  const auto segment = std::make_shared<Segment>(size_t{1} << 26);
  std::vector<std::byte*> blocks;
  for (size_t i = 1; i < 200; ++i) {
    blocks.push_back(segment->allocate(i * 997));
    std::memset(blocks.back(), static_cast<int>(i), i * 997);
  }
  bool apart = true;
  for (size_t i = 1; i < 200; ++i) apart &= blocks[i - 1][i * 997 - 1] == static_cast<std::byte>(i);
  check(apart, "blocks do not overlap");
  for (size_t i = 0; i < blocks.size(); i += 2) segment->release(blocks[i]);
  for (size_t i = 1; i < blocks.size(); i += 2) segment->release(blocks[i]);
  check(segment->used_bytes() == 0, "everything was given back");
  std::byte* whole = segment->allocate((size_t{1} << 26) - Mapping::kHeapStart);
  segment->release(whole);
  check(true, "and joined into one piece again");
  bool refused = false;
  try {
    segment->allocate(size_t{1} << 27);
  } catch (const Fault&) {
    refused = true;
  }
  check(refused, "a full segment says so");
}

std::vector<ControlMessage> take_some(Context& context) {
  for (;;) {
    auto taken = context.take_control_messages(5);
    if (!taken || !taken->empty()) return taken ? std::move(*taken) : std::vector<ControlMessage>{};
  }
}

std::span<const std::byte> bytes_of(const std::string& text) { return {reinterpret_cast<const std::byte*>(text.data()), text.size()}; }

// Every rank writes to every other, in order, outside any operation; beside it operations go on.
void messages(bool one_host) {
  constexpr int kSize = 3;
  constexpr uint64_t kCount = 200;
  Job job(kSize, one_host);
  job.in_parallel([&](int rank) {
    Context& context = job[rank];
    const std::string large(kNoteBytes, static_cast<char>('a' + rank));
    std::thread listener([&] {
      std::map<int, uint64_t> next;
      for (uint64_t got = 0; got < kCount * (kSize - 1);) {
        for (const ControlMessage& message : take_some(context)) {
          check(message.kind == ControlMessage::Kind::message && message.group == 7 && message.tag == next[message.rank]++, "notices come in order");
          const bool right = message.tag % 50 == 0 ? message.payload == std::string(kNoteBytes, static_cast<char>('a' + message.rank))
                                                  : message.payload == std::string(message.tag % 3, 'x');
          check(right, "a notice brings what was sent");
          ++got;
        }
      }
    });
    std::vector<int32_t> data(1000, rank);
    for (uint64_t i = 0; i < kCount; ++i) {
      for (int peer = 0; peer < kSize; ++peer) {
        if (peer == rank) continue;
        while (true) {
          try {
            check(context.notify(peer, 7, i, bytes_of(i % 50 == 0 ? large : std::string(i % 3, 'x'))), "a notice is sent");
            break;
          } catch (const Fault&) {  // as many wait as may
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
          }
        }
      }
      if (i % 20 == 0) {
        wait_for(context, context.post(spec_of(rank, kSize, i, direct_all_reduce(rank, kSize, 1000), data.data(), "sum", one_host), true));
      }
    }
    listener.join();
  });
}

// A listener hears of a mismatch nobody waits for, of losses, and of the end; who takes nothing is sent no more.
void news(bool one_host) {
  Job job(3, one_host);
  job.in_parallel([&](int rank) {
    OperationSpec spec = spec_of(rank, 3, 4, nullptr, nullptr, "meant by " + std::to_string(rank), one_host);
    spec.tells_mismatch = true;
    job[rank].post(std::move(spec), false);
    const auto taken = take_some(job[rank]);
    check(taken.size() == 1 && taken[0].kind == ControlMessage::Kind::mismatch, "a mismatch is told of");
    check(taken[0].group == 1 && taken[0].tag == 4 && taken[0].titles.at(2) == "meant by 2", "it says what each rank meant");
  });
  bool refused = false;
  for (uint64_t i = 0; i <= ControlMessages::kMostWaiting.count && !refused; ++i) {
    try {
      job[0].notify(1, 1, i, {});
    } catch (const Fault& fault) {
      refused = fault.kind() == FaultKind::state && i == ControlMessages::kMostWaiting.count;
    }
  }
  check(refused, "more notices than may wait are refused");
  check(take_some(job[1]).front().tag == 0, "those before wait in order");
  job[2].close(0, true);
  for (const int rank : {0, 1}) {
    bool told = false;
    while (!told) {
      for (const ControlMessage& message : take_some(job[rank])) {
        if (message.kind != ControlMessage::Kind::loss) continue;
        check(message.rank == 2 && message.tag == static_cast<uint64_t>(LossKind::left), "a rank that left is told of");
        told = true;
      }
    }
    check(!job[rank].notify(2, 1, 0, {}), "and is sent nothing");
  }
  std::thread closer([&] { job[0].close(0, false); });
  while (job[0].take_control_messages(5)) {
  }
  closer.join();
}

}  // namespace

int main() {
  allocator();
  meets(2);
  meets(4);
  posted_as_published();
  disagreement_in_slots();
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
    messages(one_host);
    news(one_host);
    stall_before(one_host);
    abort_is_named(one_host);
    departure(one_host, true);
    departure(one_host, false);
  }
  for (const uint16_t channels : {1, 3}) eager_sums(channels);
  rests_over_rails();
  sums_over_rails(3, UINT64_MAX, 0);
  for (const int rail : {0, 1}) sums_over_rails(3, 4, rail);
  return result();
}
