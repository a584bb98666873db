// What a rank does with its memory once an operation has failed there, and what the others see of it.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "core/context.h"
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

// Rank 0 aborts sums at all moments of their lives, and has other plans for its memory at once. The others end a sum with
// what it is, or not at all, and write into no memory of an operation that is over.
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
      auto* data = arena ? reinterpret_cast<int32_t*>(blocks[static_cast<size_t>(rank)]) : ordinary[static_cast<size_t>(rank)].data();
      std::fill_n(data, kCount, rank + 1);
      auto spec = spec_of(rank, size, 1, direct_all_reduce(rank, size, kCount), data, "sum", sliced);
      spec.key.group = 100 + turn;
      const auto operation = context.post(std::move(spec), false);
      if (rank == 0) {
        rest(static_cast<int64_t>(turn * 10));
        context.abort(operation, 0);
      }
      wait_for(context, operation);
      const auto is_all = [&](int32_t value) { return std::count(data, data + kCount, value) == static_cast<int64_t>(kCount); };
      if (operation->fault() == FaultKind::none) {
        check(is_all(size * (size + 1) / 2), "what ends without a fault is the sum");
      } else if (rank == 0) {
        ++aborted;
        std::fill_n(data, kCount, kOverwritten);
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        check(is_all(kOverwritten), "nobody writes into the memory of an operation that is over");
      }
    });
  }
  check(aborted > 0, "some were aborted");
  job.in_parallel([&](int rank) { job[rank].close(5, true); });
}

}  // namespace

int main() {
  for (const bool arena : {true, false}) {
    for (const bool sliced : {true, false}) {
      abort_and_overwrite(2, arena, sliced);
      abort_and_overwrite(3, arena, sliced);
    }
  }
  return result();
}
