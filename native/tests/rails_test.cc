// Operations over several interfaces, of which one may fall silent; made for TSan and ASan.

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

// Between what they carry, rails rest for about their time-out: what was sent a moment before a look has not been
// silent since the look before, at which something had been sent a moment before, too.
void rests_over_rails() {
  constexpr uint64_t kCount = 3;
  Job job(2, false, false, false, 2);
  for (uint64_t turn = 0; turn < 12; ++turn) {
    job.in_parallel([&](int rank) {
      std::vector<int32_t> data(kCount, rank);
      // Not waited for: the thread that looks is the one that sends, so that it looks just after.
      const auto operation =
          job[rank].post(spec_of(rank, 2, turn, direct_all_reduce(rank, 2, kCount, 2), data.data(), "sum"), false);
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

}  // namespace

int main() {
  rests_over_rails();
  sums_over_rails(3, UINT64_MAX, 0);
  for (const int rail : {0, 1}) sums_over_rails(3, 4, rail);
  return result();
}
