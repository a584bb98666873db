// Tests operations over several rails, one of which may fall silent. Meant to run under TSan and ASan.

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

// Rails are idle for about their time-out between operations. If bytes were sent just before each of two checks, the
// rail has not been silent between the checks.
void rests_over_rails() {
  constexpr uint64_t kCount = 3;
  Job job(2, false, false, false, 2);
  for (uint64_t turn = 0; turn < 12; ++turn) {
    job.in_parallel([&](int rank) {
      std::vector<int32_t> data(kCount, rank);
      // Post without waiting, so that the progress thread sends the bytes and checks the rails directly afterwards.
      const auto operation =
          job[rank].post(spec_of(rank, 2, turn, direct_all_reduce(rank, 2, kCount, 2), data.data(), "sum"), false);
      std::this_thread::sleep_for(std::chrono::milliseconds(turn < 6 ? 250 : 500));
      wait_for(job[rank], operation);
      check(operation->fault() == FaultKind::none, "an all_reduce after an idle time succeeds");
    });
  }
  for (int rank = 0; rank < 2; ++rank) {
    for (const RailStatus& rail : job[rank].rails()) check(rail.is_up, "an idle rail is not abandoned");
  }
  job.in_parallel([&](int rank) { job[rank].close(5, true); });
}

// Sums over two rails. From operation `cut_before` on, rail `cut_rail` is silent.
void sums_over_rails(int size, uint64_t cut_before, int cut_rail) {
  constexpr uint64_t kOperations = 8;
  constexpr uint64_t kCount = 600000;
  // Rail 1 carries only part 1, from and to rank 1.
  const auto carries = [](int rail, int rank, int peer) { return rail == 0 || rank == 1 || peer == 1; };
  Job job(size, false, false, false, 2);
  for (uint64_t turn = 0; turn < kOperations; ++turn) {
    if (turn == cut_before) cut(cut_rail);
    job.in_parallel([&](int rank) {
      std::vector<int32_t> data(kCount, rank + static_cast<int>(turn));
      const auto operation =
          job[rank].post(spec_of(rank, size, turn, direct_all_reduce(rank, size, kCount, 2), data.data(), "sum"), true);
      wait_for(job[rank], operation);
      check(operation->fault() == FaultKind::none, "an all_reduce over rails succeeds");
      const int32_t sum = size * (size - 1) / 2 + size * static_cast<int>(turn);
      check(data == std::vector<int32_t>(kCount, sum), "an all_reduce over rails returns the sum");
    });
  }
  if (cut_before < kOperations) {
    std::map<std::pair<int, int>, bool> lost;
    const int users = cut_rail == 0 ? size * (size - 1) : 2 * (size - 1);
    while (lost.size() < static_cast<size_t>(users)) {  // losses are reported late
      for (int rank = 0; rank < size; ++rank) {
        for (const RailLoss& loss : job[rank].take_rail_losses()) {
          check(loss.rail == cut_rail, "the loss names the rail that was cut");
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
      // Between other ranks, the cut rail may have carried nothing but the end of the handshake.
      if (is_cut && !carries(cut_rail, rank, rail.peer)) continue;
      check(rail.is_up == !is_cut, "the status shows whether a rail is up");
    }
    check(job[rank].losses().empty(), "no rank is lost with a rail");
  }
  job.in_parallel([&](int rank) { job[rank].close(5, true); });
}

}  // namespace

int main() {
  rests_over_rails();
  sums_over_rails(3, UINT64_MAX, 0);
  for (const int rail : {0, 1}) sums_over_rails(3, 4, rail);
  return result();
}
