// Tests the memory of failed operations: a rank may overwrite it at once, and other ranks must not be affected.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "core/rank/context.h"
#include "checks.h"
#include "job.h"

using namespace multiring;
using namespace multiring::checks;

namespace {

constexpr int32_t kOverwritten = -1'000'000;

void rest(int64_t microseconds) {
  const auto until = Clock::now() + std::chrono::microseconds(microseconds);
  while (Clock::now() < until) std::this_thread::yield();
}

// Rank 0 aborts sums at varying times and overwrites its memory at once. The other ranks must either return the right
// sum or fail, and they must not write into the memory of an ended operation.
void abort_and_overwrite(int size, bool arena, bool sliced) {
  constexpr uint64_t kTurns = 120;
  constexpr uint64_t kCount = 300'000;
  Job job(size, true, false, false);
  std::vector<std::byte*> blocks;
  for (int rank = 0; rank < size; ++rank) blocks.push_back(job[rank].own_segment()->allocate(kCount * 4));
  std::vector<std::vector<int32_t>> ordinary(static_cast<size_t>(size), std::vector<int32_t>(kCount));
  uint64_t aborted = 0;
  for (uint64_t turn = 0; turn < kTurns; ++turn) {
    job.in_parallel([&](int rank) {
      Context& context = job[rank];
      auto* data = arena ? reinterpret_cast<int32_t*>(blocks[static_cast<size_t>(rank)])
                         : ordinary[static_cast<size_t>(rank)].data();
      std::fill_n(data, kCount, rank + 1);
      auto spec = spec_of(rank, size, 1, direct_all_reduce(rank, size, kCount), data, "sum", sliced);
      spec.key.group = 100 + turn;
      const auto operation = context.post(std::move(spec), false);
      if (rank == 0) {
        rest(static_cast<int64_t>(turn * 10));
        context.abort(operation, 0);
      }
      wait_for(context, operation);
      const auto is_all = [&](int32_t value) {
        return std::count(data, data + kCount, value) == static_cast<int64_t>(kCount);
      };
      if (operation->fault() == FaultKind::none) {
        check(is_all(size * (size + 1) / 2), "an operation without a fault returns the sum");
      } else if (rank == 0) {
        ++aborted;
        std::fill_n(data, kCount, kOverwritten);
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        check(is_all(kOverwritten), "no rank writes into the memory of an ended operation");
      }
    });
  }
  check(aborted > 0, "some operations were aborted");
  job.in_parallel([&](int rank) { job[rank].close(5, true); });
}

// The only wire of every host is cut. Before that, no operation fails, although a busy rank sends nothing for long.
// After that, the error on every waiting rank names the lost rank and its host, even if the waiting rank has nothing to
// send.
void only_wire_is_cut() {
  constexpr double kTimeout_s = 3;
  constexpr auto kLonger = std::chrono::milliseconds(4500);
  Job job(3, false, false, false, 1, kTimeout_s);
  const auto post = [&](int rank, uint64_t number) {
    return job[rank].post(spec_of(rank, 3, number, nullptr, nullptr, "barrier", false), false);
  };
  job.in_parallel([&](int rank) { wait_for(job[rank], post(rank, 1)); });
  std::this_thread::sleep_for(kLonger);
  const std::vector<std::shared_ptr<Operation>> waiting{post(1, 2), post(2, 2)};
  std::this_thread::sleep_for(kLonger);
  for (int rank = 0; rank < 3; ++rank) check(job[rank].losses().empty(), "a busy rank is not lost");
  cut(0);
  const auto start = Clock::now();
  while (!job[1].has_ended(*waiting[0]) || !job[2].has_ended(*waiting[1]))
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  const auto late = post(0, 2);
  wait_for(job[0], late);
  check(Clock::now() - start < 4 * as_duration(kTimeout_s), "the cut is detected in bounded time");
  for (const auto& operation : {waiting[0], waiting[1], late}) {
    check(operation->fault() == FaultKind::peer_lost, "a rank whose host is cut off is a lost peer");
    const std::string& text = operation->fault_text();
    check(text.find(" cannot be reached (nothing") != std::string::npos && text.find("host") != std::string::npos,
          "the error names the host of the lost rank");
  }
  job.in_parallel([&](int rank) { job[rank].close(0, true); });
}

// The only wire between ranks 0 and 2 is cut. Each of them tells rank 1, which reaches both, that the other is lost. An
// operation of all three fails on rank 1, too. If the ranks vote, rank 1 still reaches both of the others.
void a_wire_of_others_is_cut(bool votes) {
  constexpr double kTimeout_s = 2;
  Job job(3, false, false, false, 1, kTimeout_s, false, votes, true);
  const auto meet = [&](int one, int other, uint64_t number) {  // returns whether both succeed
    std::vector<std::shared_ptr<Operation>> operations;
    for (const int rank : {one, other}) {
      auto spec = spec_of(rank, 3, number, nullptr, nullptr, "barrier", false);
      spec.key.group = static_cast<uint64_t>(10 + one + other);
      spec.members = {one, other};
      spec.rounds = std::make_shared<std::vector<Round>>(std::vector<Round>{{one + other - rank, one + other - rank}});
      operations.push_back(job[rank].post(std::move(spec), false));
    }
    wait_for(job[one], operations[0]);
    wait_for(job[other], operations[1]);
    return operations[0]->fault() == FaultKind::none && operations[1]->fault() == FaultKind::none;
  };
  const auto before = connections();
  check(meet(0, 2, 1), "ranks meet");
  for (const int fd : connections(before)) silence(fd);
  check(!meet(0, 2, 2), "ranks that a cut wire parts lose each other");
  std::vector<std::shared_ptr<Operation>> of_all;
  for (int rank = 0; rank < 3; ++rank) {
    of_all.push_back(job[rank].post(spec_of(rank, 3, 1, nullptr, nullptr, "barrier", false), false));
    if (rank == 0) continue;  // then rank 1 tells rank 2, before that begins, that rank 2 cannot be reached
    wait_for(job[rank], of_all[static_cast<size_t>(rank)]);
  }
  for (int rank = 0; rank < 3; ++rank) {
    wait_for(job[rank], of_all[static_cast<size_t>(rank)]);
    check(of_all[static_cast<size_t>(rank)]->fault() == FaultKind::peer_lost, "an operation of all fails on all ranks");
  }
  const auto until = Clock::now() + std::chrono::seconds(10);
  while (!votes && job[1].losses().size() < 2 && Clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the reports are under way
  }
  check(meet(0, 1, 1) == votes, "who votes loses only those whom it does not reach");
  check(meet(1, 2, 1) == votes, "who votes loses only those whom it does not reach");
  check(job[1].losses().empty() == votes, "who votes believes no reports");
  check(!job[2].losses().contains(1) == votes, "nor reports that it cannot be reached itself");
  job.in_parallel([&](int rank) { job[rank].close(0, true); });
}

// Returns a program that sends `count` int32 values from rank 0 to rank 1.
std::shared_ptr<const Program> message(int rank, uint64_t count) {
  auto program = std::make_shared<Program>();
  program->dtype = DType::i32;
  program->moves.push_back({.kind = rank == 0 ? MoveKind::send : MoveKind::copy, .source_space = 1, .target_space = 1,
                            .size = count * 4, .peers = {1 - rank}});
  return program;
}

// Rank 0's segment has room for only one staging slot more than the link's regular slots. Sometimes a message has no
// slot and cannot get one. Only the operation of that message must fail, whichever operation is being driven.
void a_full_segment_fails_what_finds_no_room() {
  constexpr uint64_t kCount = 2'000'000;
  constexpr size_t kSlotBytes = 128 * 1024;
  constexpr size_t kRoom = 9 * kSlotBytes;
  Job job(2, true, true, false);
  const Mapping& arena = job[0].own_segment()->mapping();
  job[0].own_segment()->allocate(arena.bytes() - Mapping::kHeapStart - kRoom - kPage);
  std::atomic<int> failed{0};
  for (uint64_t turn = 0; turn < 20; ++turn) {
    job.in_parallel([&](int rank) {
      std::vector<std::vector<int32_t>> data(4, std::vector<int32_t>(kCount, rank));
      std::vector<std::shared_ptr<Operation>> operations;
      for (uint64_t i = 0; i < data.size(); ++i) {
        operations.push_back(
            job[rank].post(spec_of(rank, 2, turn * 10 + i, message(rank, kCount), data[i].data(), "message"), false));
      }
      for (size_t i = 0; i < data.size(); ++i) {
        wait_for(job[rank], operations[i]);
        if (operations[i]->fault() == FaultKind::none) {
          check(data[i] == std::vector<int32_t>(kCount, 0), "a message arrives");
          continue;
        }
        ++failed;
        const char* text = rank == 0 ? "no room for 131072 bytes" : "rank 0 could not continue it";
        check(operations[i]->fault() == FaultKind::state && operations[i]->fault_text().find(text) == 0,
              "an operation without room reports the reason");
      }
      const auto after = job[rank].post(spec_of(rank, 2, turn * 10 + 9, nullptr, nullptr, "barrier"), true);
      wait_for(job[rank], after);
      check(after->fault() == FaultKind::none, "later operations of the rank succeed");
    });
  }
  check(failed > 0, "some operations found no room");
  job.in_parallel([&](int rank) { job[rank].close(5, true); });
}

// Repeated failure reports are not kept, and neither are frames for operations that have ended or never begin.
void nothing_is_kept_of_failures(bool one_host) {
  Job job(3, one_host);
  const auto post = [&](int rank, uint64_t group, uint64_t number) {
    auto spec = spec_of(rank, 3, number, nullptr, nullptr, "barrier", one_host);
    spec.key.group = group;
    return job[rank].post(std::move(spec), false);
  };
  for (uint64_t group = 100; group < 120; ++group) {
    job[2].abort(post(2, group, 1), 2);
    for (const int rank : {0, 1}) {  // a late rank fails, too, and reports its failure to the others again
      const auto operation = post(rank, group, 1);
      wait_for(job[rank], operation);
      check(operation->fault() == FaultKind::state, "an aborted operation fails");
    }
  }
  job.in_parallel([&](int rank) { wait_for(job[rank], post(rank, 1, 1)); });
  for (int rank = 0; rank < 3; ++rank) {
    const auto until = Clock::now() + std::chrono::seconds(5);
    while (job[rank].unexpected_frames() != 0 && Clock::now() < until)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    check(job[rank].unexpected_frames() == 0, "no frame is kept for an ended operation");
  }
  job.in_parallel([&](int rank) { job[rank].close(5, true); });
}

}  // namespace

int main() {
  nothing_is_kept_of_failures(true);
  nothing_is_kept_of_failures(false);
  a_full_segment_fails_what_finds_no_room();
  only_wire_is_cut();
  a_wire_of_others_is_cut(true);
  a_wire_of_others_is_cut(false);
  for (const bool arena : {true, false}) {
    for (const bool sliced : {true, false}) {
      abort_and_overwrite(2, arena, sliced);
      abort_and_overwrite(3, arena, sliced);
    }
  }
  return result();
}
