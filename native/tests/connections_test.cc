// Tests links whose rail has several connections, each with a thread. Meant to run under TSan and ASan.

#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
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

std::unique_ptr<Job> job_of(int size, uint16_t connections, bool seal, double wire_timeout_s = 60) {
  return std::make_unique<Job>(size, false, false, false, 1, wire_timeout_s, seal, false, false, connections);
}

// Sums of very different sizes, several at once. The frames of each stream travel over all connections.
void sums(int size, uint16_t connections, bool seal) {
  constexpr uint64_t kCounts[] = {3, 40'000, 1'000'000, 7, 300'001, 64};
  const auto job = job_of(size, connections, seal);
  job->in_parallel([&](int rank) {
    Context& context = (*job)[rank];
    for (uint64_t turn = 0; turn < 6; ++turn) {
      std::vector<std::vector<int32_t>> data;
      std::vector<std::shared_ptr<Operation>> operations;
      for (const uint64_t count : kCounts) {
        auto& own = data.emplace_back(count);
        for (uint64_t i = 0; i < count; ++i) own[i] = static_cast<int32_t>(i + turn) * (rank + 1);
        const uint64_t sequence = turn * std::size(kCounts) + operations.size();
        operations.push_back(context.post(
            spec_of(rank, size, sequence, direct_all_reduce(rank, size, count), own.data(), "sum"), false));
      }
      for (size_t each = 0; each < operations.size(); ++each) {
        wait_for(context, operations[each]);
        check(operations[each]->fault() == FaultKind::none, "an all_reduce over several connections succeeds");
        bool right = true;
        for (uint64_t i = 0; i < kCounts[each]; ++i) {
          right &= data[each][i] == static_cast<int32_t>(i + turn) * (size * (size + 1) / 2);
        }
        check(right, "an all_reduce over several connections returns the sum");
      }
    }
  });
  for (int rank = 0; rank < size; ++rank) {
    const auto rails = (*job)[rank].rails();
    check(rails.size() == static_cast<size_t>(size - 1), "the connections count as one rail");
    for (const RailStatus& rail : rails) check(rail.is_up && rail.rail == 0, "the rail is up");
  }
  // Rank 0 ends its connections one after another while the other ranks go on.
  (*job)[0].close(5, true);
  for (int rank = 1; rank < size; ++rank) {
    std::map<int, Loss> losses;
    while ((losses = (*job)[rank].losses()).empty()) std::this_thread::yield();
    check(losses.size() == 1 && losses.contains(0) && losses.at(0).kind == LossKind::left,
          "a rank that leaves does not count as dead");
  }
  job->in_parallel([&](int rank) { (*job)[rank].close(5, true); });
}

enum class Harm : uint8_t { ended, silent };

// Sums go on until connection `which` ends or falls silent. Then all ranks fail, soon and with the reason.
void loses_a_connection(uint16_t connections, bool seal, Harm harm, size_t which) {
  constexpr uint64_t kCount = 500'000;
  const std::set<int> before = checks::connections();
  const auto job = job_of(2, connections, seal, 3);
  const std::set<int> fresh = checks::connections(before);
  check(fresh.size() == size_t{2} * connections, "there are as many connections as were chosen");
  const int victim = *std::next(fresh.begin(), static_cast<int64_t>(which % fresh.size()));
  const auto start = Clock::now();
  std::thread attacker([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    if (harm == Harm::ended) {
      ::shutdown(victim, SHUT_RDWR);
    } else {
      silence(victim);
    }
  });
  job->in_parallel([&](int rank) {
    Context& context = (*job)[rank];
    for (uint64_t turn = 0;; ++turn) {
      std::vector<int32_t> data(kCount, rank + 1);
      const auto operation =
          context.post(spec_of(rank, 2, turn, direct_all_reduce(rank, 2, kCount), data.data(), "sum"), true);
      wait_for(context, operation);
      if (operation->fault() != FaultKind::none) break;
      check(data == std::vector<int32_t>(kCount, 3), "a sum before the loss is right");
    }
  });
  attacker.join();
  check(Clock::now() - start < std::chrono::seconds(60), "the loss of a connection ends the operations in time");
  bool is_named = false;
  for (int rank = 0; rank < 2; ++rank) {
    const auto losses = (*job)[rank].losses();
    check(losses.size() == 1, "the other rank is lost");
    for (const auto& [peer, loss] : losses) {
      is_named |= harm == Harm::silent ? loss.kind == LossKind::cut_off
                                       : seal || loss.why.find("(connection ") != std::string::npos;
    }
  }
  check(is_named, "the loss has its reason");
  job->in_parallel([&](int rank) { (*job)[rank].close(0, false); });
}

// Rank 0 aborts sums at varying times and overwrites its memory at once, while threads may be reading into it.
void abort_and_overwrite(uint16_t connections, bool seal) {
  constexpr uint64_t kTurns = 60;
  constexpr uint64_t kCount = 600'000;
  const auto job = job_of(2, connections, seal);
  std::vector<std::vector<int32_t>> memory(2, std::vector<int32_t>(kCount));
  for (uint64_t turn = 0; turn < kTurns; ++turn) {
    job->in_parallel([&](int rank) {
      Context& context = (*job)[rank];
      int32_t* data = memory[static_cast<size_t>(rank)].data();
      std::fill_n(data, kCount, rank + 1);
      auto spec = spec_of(rank, 2, 1, direct_all_reduce(rank, 2, kCount), data, "sum");
      spec.key.group = 100 + turn;
      const auto operation = context.post(std::move(spec), false);
      if (rank == 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(turn * 40));
        context.abort(operation, 0);
      }
      wait_for(context, operation);
      const auto is_all = [&](int32_t value) {
        return std::count(data, data + kCount, value) == static_cast<int64_t>(kCount);
      };
      if (operation->fault() == FaultKind::none) {
        check(is_all(3), "an operation without a fault returns the sum");
      } else if (rank == 0) {
        std::fill_n(data, kCount, kOverwritten);
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        check(is_all(kOverwritten), "nothing is written into the memory of an ended operation");
      }
    });
  }
  job->in_parallel([&](int rank) { (*job)[rank].close(5, true); });
}

template <typename Work>
bool is_refused(Work work) {
  try {
    work();
    return false;
  } catch (const Fault&) {
    return true;
  }
}

void refuses_unfit() {
  ContextConfig config;
  config.secret = "secret of sixteen";
  config.segment_bytes = size_t{1} << 24;
  Context context(config);
  check(is_refused([&] { context.use_connections(0); }), "no connection is rejected");
  check(is_refused([&] { context.use_connections(65); }), "too many connections are rejected");
  context.use_connections(2);
  check(is_refused([&] { context.use_connections(2); }), "a second choice is rejected");
  context.close(0, false);
  config.by_mpi = true;
  Context by_mpi(config);
  check(is_refused([&] { by_mpi.use_connections(2); }), "several connections with MPI are rejected");
  by_mpi.close(0, false);
}

}  // namespace

int main() {
  refuses_unfit();
  for (const bool seal : {false, true}) {
    for (const uint16_t connections : {2, 4}) {
      sums(2, connections, seal);
      sums(3, connections, seal);
      abort_and_overwrite(connections, seal);
      loses_a_connection(connections, seal, Harm::ended, connections - 1U);
    }
    loses_a_connection(2, seal, Harm::ended, 2);
    loses_a_connection(3, seal, Harm::silent, 4);
  }
  return result();
}
