// Tests the mpi engine without MPI. The ranks are threads, and a simulated MPI in memory delivers messages out of
// order. Meant to run under TSan.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>
#include <tuple>

#include "core/rank/context.h"
#include "checks.h"

using namespace multiring;
using namespace multiring::checks;

namespace {

// Simulates the guarantees of MPI: a message matches the receive with its sender and tag, and several messages complete
// in any order.
class PostOffice {
 public:
  void post(int rank, const BounceBuffer& bounce) {
    const std::lock_guard lock(mutex_);
    const auto place =
        bounce.is_outgoing ? std::tuple(rank, bounce.peer, bounce.tag) : std::tuple(bounce.peer, rank, bounce.tag);
    auto& [sends, receives] = open_[place];
    (bounce.is_outgoing ? sends : receives).push_back({rank, bounce});
    if (sends.empty() || receives.empty()) return;
    const auto [from, sent] = sends.front();
    const auto [to, received] = receives.front();
    check(sent.size == received.size, "a message has its announced size");
    std::memcpy(received.data, sent.data, sent.size);
    done_[from].push_back(sent.number);
    done_[to].push_back(received.number);
    open_.erase(place);
  }

  std::vector<uint64_t> collect(int rank) {
    const std::lock_guard lock(mutex_);
    auto done = std::exchange(done_[rank], {});
    std::shuffle(done.begin(), done.end(), random_);
    return done;
  }

 private:
  using Posted = std::pair<int, BounceBuffer>;
  std::mutex mutex_;
  std::minstd_rand random_;
  std::map<std::tuple<int, int, uint32_t>, std::pair<std::vector<Posted>, std::vector<Posted>>> open_;
  std::map<int, std::vector<uint64_t>> done_;
};

struct MpiJob {
  PostOffice office;
  std::vector<std::unique_ptr<Context>> ranks;
  std::vector<std::thread> carriers;
  std::atomic<int> mute{-1};  // a rank whose messages are no longer delivered
  std::atomic<std::chrono::milliseconds> pause{};  // delay before messages are delivered

  explicit MpiJob(int size, double stall_timeout_s = 60) {
    std::vector<PeerAddress> addresses;
    for (int rank = 0; rank < size; ++rank) {
      ranks.push_back(std::make_unique<Context>(ContextConfig{
          .rank = rank, .size = size, .job = "test", .secret = "secret", .segment_bytes = size_t{1} << 26,
          .stall_warn_s = stall_timeout_s, .stall_timeout_s = stall_timeout_s, .by_mpi = true}));
      const uint16_t port = ranks.back()->listen("127.0.0.1", 0, 0);
      addresses.push_back({rank, false, ranks.back()->handover_name(), {{"127.0.0.1", port}}});
    }
    for (int rank = 0; rank < size; ++rank) carriers.emplace_back([this, rank] { carry(rank); });
    in_parallel([&](int rank) {
      std::vector<int> neighbours;
      std::vector<PeerAddress> peers;
      for (int peer = 0; peer < size; ++peer) {
        if (peer == rank) continue;
        if (peer == rank + 1 || peer == rank - 1) neighbours.push_back(peer);  // other links are made on first use
        peers.push_back(addresses[static_cast<size_t>(peer)]);
      }
      ranks[static_cast<size_t>(rank)]->connect(peers, {rank}, neighbours, 30, [] { return false; });
    });
  }
  ~MpiJob() {
    for (auto& rank : ranks) rank->close(0, false);
    for (auto& carrier : carriers) carrier.join();
  }

  void carry(int rank) {
    Context& context = *ranks[static_cast<size_t>(rank)];
    for (;;) {
      const auto work = context.collect(std::chrono::microseconds(50));
      if (work.is_closed) return;
      std::this_thread::sleep_for(pause.load());
      for (const BounceBuffer& bounce : work.bounces) {
        if (mute != rank && mute != bounce.peer) office.post(rank, bounce);
      }
      const auto done = office.collect(rank);
      if (!done.empty()) context.carried(done);
    }
  }

  int size() const { return static_cast<int>(ranks.size()); }
  void in_parallel(const std::function<void(int)>& work) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size(); ++rank) threads.emplace_back(work, rank);
    for (auto& thread : threads) thread.join();
  }
};

// Returns an operation that sends `count` int32 of every rank to all ranks, in offers of different sizes, and sums
// them.
OperationSpec sum_of(int rank, int size, uint64_t sequence, uint64_t count, std::vector<int32_t>& data) {
  auto program = std::make_shared<Program>();
  program->dtype = DType::i32;
  program->scratch_bytes = count * 4;
  std::vector<int> all(static_cast<size_t>(size));
  std::iota(all.begin(), all.end(), 0);
  std::vector<int> others;
  for (const int peer : all) {
    if (peer != rank) others.push_back(peer);
  }
  program->moves.push_back(
      {.kind = MoveKind::copy, .source_space = 1, .target_space = 2, .size = count * 4, .peers = {rank}});
  for (uint64_t at = 0, size_bytes = 4; at < count * 4; at += size_bytes, size_bytes *= 3) {
    size_bytes = std::min(size_bytes, count * 4 - at);
    program->moves.push_back(
        {.kind = MoveKind::send, .source_space = 2, .source_offset = at, .size = size_bytes, .peers = others});
  }
  program->moves.push_back(
      {.kind = MoveKind::reduce, .last = true, .source_space = 2, .target_space = 1, .size = count * 4, .peers = all});
  OperationSpec spec;
  spec.key = {1, sequence};
  spec.members = all;
  auto rounds = std::make_shared<std::vector<Round>>();
  for (int distance = 1; distance < size; distance *= 2)
    rounds->push_back({(rank + distance) % size, (rank + size - distance) % size});
  spec.rounds = rounds;
  spec.description = "sum";
  spec.program = program;
  spec.bases = {nullptr, reinterpret_cast<std::byte*>(data.data())};
  spec.user_bytes = count * 4;
  return spec;
}

void wait_for(Context& context, const std::shared_ptr<Operation>& operation) {
  while (context.wait(operation, 1) != Context::Waited::ended) {
  }
}

void sums(int size) {
  MpiJob job(size);
  job.in_parallel([&](int rank) {
    Context& context = *job.ranks[static_cast<size_t>(rank)];
    std::vector<std::vector<int32_t>> data;
    std::vector<std::shared_ptr<Operation>> operations;
    const std::vector<uint64_t> counts{1, 1000, 1'500'000, 70'000};  // more than a window, and several at once
    for (const uint64_t count : counts) data.emplace_back(count, rank + 1);
    for (size_t i = 0; i < counts.size(); ++i) {
      operations.push_back(context.post(sum_of(rank, size, i + 1, counts[i], data[i]), false));
    }
    for (size_t i = 0; i < counts.size(); ++i) {
      wait_for(context, operations[i]);
      check(operations[i]->fault() == FaultKind::none, "a sum over MPI succeeds");
      check(data[i] == std::vector<int32_t>(counts[i], size * (size + 1) / 2), "a sum over MPI is right");
    }
    context.close(5, true);  // the ranks close at different times; sent messages must still arrive
  });
}

void silence() {
  MpiJob job(3, 0.5);
  job.mute = 2;
  job.in_parallel([&](int rank) {
    Context& context = *job.ranks[static_cast<size_t>(rank)];
    std::vector<int32_t> data(500'000, rank);
    const auto operation = context.post(sum_of(rank, 3, 1, data.size(), data), true);
    wait_for(context, operation);
    check(operation->fault() == FaultKind::stall, "an operation fails at the time-out if messages never arrive");
    check(context.settled(5), "no rank waits for lost messages afterwards");
  });
}

void loss() {
  MpiJob job(3);
  job.mute = 1;
  job.in_parallel([&](int rank) {
    Context& context = *job.ranks[static_cast<size_t>(rank)];
    if (rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      job.ranks[0]->cannot_reach(1, "the test says so");
      return;
    }
    std::vector<int32_t> data(500'000, rank);
    const auto operation = context.post(sum_of(rank, 3, 1, data.size(), data), true);
    wait_for(context, operation);
    check(operation->fault() == FaultKind::peer_lost, "a peer that MPI cannot reach is lost on every rank");
    // Rank 1 detects the end of its connection with rank 0, and may be the first to report it to rank 2.
    const std::string& text = operation->fault_text();
    check(text.find("rank 1 died") == 0 || (rank == 2 && text.find("rank 0 died") == 0),
          "the error names the lost rank");
  });
}

void goodput() {
  using namespace std::chrono_literals;
  MpiJob job(2);
  job.pause = 20ms;
  job.in_parallel([&](int rank) {
    Context& context = *job.ranks[static_cast<size_t>(rank)];
    check(context.goodputs().empty(), "there is no goodput before the first message");
    std::vector<int32_t> data(2'000'000, rank);
    wait_for(context, context.post(sum_of(rank, 2, 1, data.size(), data), true));
    const auto found = context.goodputs();
    check(found.size() == 1 && found[0].first == 1 - rank, "there is a goodput after many messages");
    // One window is in transit at a time, and up to half a window more when the sum ends.
    constexpr auto kMost = static_cast<uint64_t>(1.5 * (2 << 20) / 0.02);
    for (const auto& [peer, rate] : found) check(rate > 0 && rate < kMost, "the goodput matches the message delay");
  });
}

}  // namespace

int main() {
  sums(2);
  sums(4);
  silence();
  loss();
  goodput();
  return result();
}
