// Tests sealed connections: a proxy between two ranks changes what they send.
//
//   sealing_test [ATTACKS [SEED]]
//
// The proxy knows nothing but the sizes of the records, as an attacker would. After every attack, each collective
// either returns the sum or fails, and at least one fails; the loss names the connection.

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <thread>

#include "checks.h"
#include "core/rank/context.h"
#include "job.h"

using namespace multiring;
using namespace multiring::checks;

namespace {

constexpr const char* kSecret = "a secret of the job, long enough";
constexpr size_t kHandshakeBytes[2] = {40 + 33 + 32, 16 + 33 + 32 + 1};  // from the caller, from the called rank

// ---- a proxy between two ranks ---------------------------------------------------------------

enum class Attack : uint8_t { none, flip, drop, repeat, swap, cut, inject, count };

// A record that is withheld, or a size that promises more bytes than follow, looks like a slow network.
bool withholds(Attack attack) {
  return attack == Attack::drop || attack == Attack::swap || attack == Attack::flip || attack == Attack::inject;
}

struct Plan {
  Attack attack = Attack::none;
  int direction = 0;    // 0: from the caller
  size_t record = 0;    // the record that is attacked
  bool splits = true;   // false: the bytes are not sealed, and pass as they come
  uint64_t random = 0;  // chooses the bit, the cut, or the injected bytes
};

// Copies bytes between a caller and the rank at `port`, splits them into records, and attacks one of them.
class Proxy {
 public:
  Proxy(uint16_t port, const Plan& plan) : plan_(plan), target_(port) {
    listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address = local(0);
    socklen_t size = sizeof address;
    if (::bind(listener_, reinterpret_cast<sockaddr*>(&address), size) != 0 || ::listen(listener_, 8) != 0) std::abort();
    ::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size);
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this] { serve(); });
  }
  ~Proxy() {
    ::shutdown(listener_, SHUT_RDWR);
    thread_.join();
    ::close(listener_);
  }
  uint16_t port() const { return port_; }
  bool attacked() const { return attacked_; }
  std::string seen() const {
    const std::lock_guard lock(mutex_);
    return seen_;
  }

 private:
  static sockaddr_in local(uint16_t port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(port);
    return address;
  }

  void serve() {
    for (;;) {
      const int here = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      if (here < 0) return;
      const int there = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
      const sockaddr_in address = local(target_);
      if (::connect(there, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) {
        std::thread back([&] { copy(there, here, 1); });
        copy(here, there, 0);
        back.join();
      }
      ::close(here);
      ::close(there);
    }
  }

  static void end(int from, int to) {
    ::shutdown(from, SHUT_RDWR);
    ::shutdown(to, SHUT_RDWR);
  }

  static bool put(int to, const std::string& bytes) {
    for (size_t at = 0; at < bytes.size();) {
      const ssize_t sent = ::send(to, bytes.data() + at, bytes.size() - at, MSG_NOSIGNAL);
      if (sent <= 0) return false;
      at += static_cast<size_t>(sent);
    }
    return true;
  }

  void copy(int from, int to, int direction) {
    std::string held;
    std::string delayed;  // a record that the next one overtakes
    size_t handshake = kHandshakeBytes[direction];
    size_t record = 0;
    std::string buffer(1 << 18, '\0');
    for (;;) {
      const ssize_t got = ::recv(from, buffer.data(), buffer.size(), 0);
      if (got <= 0) break;
      held.append(buffer, 0, static_cast<size_t>(got));
      {
        const std::lock_guard lock(mutex_);
        if (seen_.size() < 1 << 22) seen_.append(buffer, 0, static_cast<size_t>(got));
      }
      if (!plan_.splits) {
        if (!put(to, std::exchange(held, {}))) break;
        continue;
      }
      if (handshake > 0) {
        const size_t step = std::min(handshake, held.size());
        if (!put(to, held.substr(0, step))) break;
        held.erase(0, step);
        handshake -= step;
      }
      if (!pass_records(held, delayed, to, direction, record)) break;
    }
    end(from, to);
  }

  bool pass_records(std::string& held, std::string& delayed, int to, int direction, size_t& record) {
    size_t at = 0;
    std::string passed;
    bool goes_on = true;
    for (; goes_on && held.size() - at >= SealedStream::kHeadBytes; ++record) {
      uint32_t size = 0;
      std::memcpy(&size, held.data() + at, sizeof size);
      const size_t whole = SealedStream::kHeadBytes + size + Seal::kTagBytes;
      if (held.size() - at < whole) break;
      std::string bytes = held.substr(at, whole);
      at += whole;
      if (!std::exchange(delayed, {}).empty()) {
        passed += bytes + delayed_;
        continue;
      }
      if (direction != plan_.direction || record != plan_.record || plan_.attack == Attack::none) {
        passed += bytes;
        continue;
      }
      attacked_ = true;
      switch (plan_.attack) {
        case Attack::flip: {
          const size_t bit = plan_.random % (8 * bytes.size());
          bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << bit % 8));
          passed += bytes;
          break;
        }
        case Attack::drop:
          break;
        case Attack::repeat:
          passed += bytes + bytes;
          break;
        case Attack::swap:
          delayed = delayed_ = bytes;
          break;
        case Attack::cut:
          passed += bytes.substr(0, plan_.random % (bytes.size() + 1));
          goes_on = false;
          break;
        default: {
          std::mt19937_64 noise(plan_.random);
          std::string forged(1 + plan_.random % 200, '\0');
          for (char& each : forged) each = static_cast<char>(noise());
          if (noise() % 2 == 0) {  // with a plausible size
            const uint32_t plausible = static_cast<uint32_t>(forged.size());
            forged = std::string(reinterpret_cast<const char*>(&plausible), 4) + forged + std::string(16, 't');
          }
          passed += forged + bytes;
        }
      }
    }
    held.erase(0, at);
    return put(to, passed) && goes_on;
  }

  const Plan plan_;
  const uint16_t target_;
  int listener_ = -1;
  uint16_t port_ = 0;
  std::thread thread_;
  std::atomic<bool> attacked_{false};
  std::string delayed_;
  mutable std::mutex mutex_;
  std::string seen_;
};

std::unique_ptr<Context> rank_of_two(int rank, bool seals) {
  return std::make_unique<Context>(ContextConfig{.rank = rank, .size = 2, .job = "test", .secret = kSecret,
                                                 .segment_bytes = size_t{1} << 26, .stall_warn_s = 60,
                                                 .stall_timeout_s = 60, .seal = seals});
}

struct Outcome {
  int right = 0;
  int failed = 0;
  int wrong = 0;
  std::string why;  // of the losses
  bool attacked = false;
  std::string seen;
};

int32_t element(uint64_t turn, int rank, size_t at) {
  return static_cast<int32_t>(turn * 1000003 + static_cast<uint64_t>(rank) * 7919 + at * 31);
}

// Two ranks sum over the proxy. If nothing moves any more, because the attack withholds a record, the operation is given
// up, as the stall time-out would do.
Outcome sum_over(const Plan& plan, uint64_t turns, uint64_t count) {
  const bool seals = plan.splits;
  const std::unique_ptr<Context> ranks[2] = {rank_of_two(0, seals), rank_of_two(1, seals)};
  const uint16_t ports[2] = {ranks[0]->listen("127.0.0.1", 0, 0), ranks[1]->listen("127.0.0.1", 0, 0)};
  Outcome outcome;
  {
    Proxy proxy(ports[1], plan);  // rank 0 calls rank 1
    std::mutex mutex;
    const auto work = [&](int rank) {
      Context& context = *ranks[rank];
      const PeerAddress peer{.rank = 1 - rank, .same_host = false, .handover = "",
                             .rails = {{"127.0.0.1", rank == 0 ? proxy.port() : ports[0]}}, .host = ""};
      bool fails = false;
      try {
        context.connect({peer}, {rank}, {1 - rank}, 30, [] { return false; });
      } catch (const Fault& fault) {
        fails = true;
        const std::lock_guard lock(mutex);
        ++outcome.failed;
        outcome.why += fault.what();
      }
      for (uint64_t turn = 0; turn < turns && !fails; ++turn) {
        std::vector<int32_t> data(count);
        for (size_t at = 0; at < data.size(); ++at) data[at] = element(turn, rank, at);
        std::vector<int32_t> want(count);
        for (size_t at = 0; at < want.size(); ++at) want[at] = element(turn, 0, at) + element(turn, 1, at);
        std::shared_ptr<Operation> operation;
        try {
          operation = context.post(spec_of(rank, 2, turn, direct_all_reduce(rank, 2, count), data.data(), "sum"), true);
          while (context.wait(operation, 0.25) == Context::Waited::timed_out) {
            const double patience_s = withholds(plan.attack) && proxy.attacked() ? 1 : 60;
            if (context.stalled_on(*operation).second > patience_s) context.give_up(operation, 1 - rank);
          }
          fails = operation->fault() != FaultKind::none;
        } catch (const Fault&) {
          fails = true;
        }
        const std::lock_guard lock(mutex);
        if (fails) {
          ++outcome.failed;
        } else {
          ++(data == want ? outcome.right : outcome.wrong);
        }
      }
      const auto losses = context.losses();
      const std::lock_guard lock(mutex);
      for (const auto& [lost, loss] : losses) outcome.why += "rank " + std::to_string(lost) + ": " + loss.why + ". ";
    };
    std::thread other(work, 1);
    work(0);
    other.join();
    outcome.attacked = proxy.attacked();
    outcome.seen = proxy.seen();
    for (const auto& rank : ranks) rank->close(0, false);
  }
  return outcome;
}

void attacks(uint64_t count, uint64_t seed) {
  constexpr uint64_t kTurns = 6;
  std::mt19937_64 engine(seed);
  std::map<Attack, uint64_t> done;
  for (uint64_t i = 0; i < count; ++i) {
    Plan plan;
    plan.attack = static_cast<Attack>(1 + i % (static_cast<uint64_t>(Attack::count) - 1));
    plan.direction = static_cast<int>(engine() % 2);
    plan.record = engine() % 12;
    plan.random = engine();
    const uint64_t elements = engine() % 3 == 0 ? 50'000 : 1 + engine() % 3000;
    const Outcome outcome = sum_over(plan, kTurns, elements);
    check(outcome.wrong == 0, "no attack changes a sum");
    if (!outcome.attacked) continue;  // the ranks sent fewer records
    ++done[plan.attack];
    const bool is_last = outcome.right == 2 * static_cast<int>(kTurns);  // after the last sum, nothing can fail
    check(outcome.failed > 0 || is_last, "an attack ends the collectives");
    check(is_last || outcome.why.find("rank ") != std::string::npos || withholds(plan.attack),
          "the loss names the connection");
    const bool is_named = outcome.why.find("not authentic") != std::string::npos ||
                          outcome.why.find("sealed record") != std::string::npos;
    check(is_named || is_last || withholds(plan.attack) || plan.attack == Attack::cut,
          "the loss says that bytes were changed");
    if (outcome.wrong > 0 || (outcome.failed == 0 && !is_last)) {
      std::printf("attack %d, direction %d, record %zu, random %lu, seed %lu: %d right, %d failed, %s\n",
                  static_cast<int>(plan.attack), plan.direction, plan.record,
                  static_cast<unsigned long>(plan.random), static_cast<unsigned long>(seed), outcome.right,
                  outcome.failed, outcome.why.c_str());
    }
  }
  for (const auto& [attack, times] : done) {
    std::printf("attack %d: %lu times\n", static_cast<int>(attack), static_cast<unsigned long>(times));
  }
  check(done.size() == static_cast<size_t>(Attack::count) - 1, "every kind of attack happened");
}

// Whether a proxy sees a part of the gradient.
void shows_nothing() {
  constexpr uint64_t kCount = 50'000;
  std::vector<int32_t> part;
  const auto find = [&](const Outcome& outcome) {
    part.clear();
    for (size_t at = kCount / 2; at < kCount / 2 + 4; ++at) part.push_back(element(1, 0, at));
    return outcome.seen.find(std::string(reinterpret_cast<const char*>(part.data()), 16)) != std::string::npos;
  };
  Plan unsealed;
  unsealed.splits = false;
  const Outcome plain = sum_over(unsealed, 3, kCount);
  check(plain.right == 6 && find(plain), "without sealing, the gradient is in the capture");
  const Outcome sealed = sum_over(Plan{}, 3, kCount);
  check(sealed.right == 6 && sealed.seen.size() > 3 * kCount * 4 && !find(sealed), "sealed, it is not");
}

void refuses_a_mixture() {
  const std::unique_ptr<Context> ranks[2] = {rank_of_two(0, true), rank_of_two(1, false)};
  const uint16_t ports[2] = {ranks[0]->listen("127.0.0.1", 0, 0), ranks[1]->listen("127.0.0.1", 0, 0)};
  std::atomic<int> refused{0};
  const auto join = [&](int rank) {
    const PeerAddress peer{
        .rank = 1 - rank, .same_host = false, .handover = "", .rails = {{"127.0.0.1", ports[1 - rank]}}, .host = ""};
    try {
      ranks[rank]->connect({peer}, {rank}, {1 - rank}, 2, [] { return false; });
    } catch (const Fault& fault) {
      if (fault.kind() == FaultKind::rendezvous) ++refused;
    }
  };
  std::thread other(join, 1);
  join(0);
  other.join();
  check(refused == 2, "a rank that seals and a rank that does not reject each other in time");
}

void refuses_unfit() {
  const auto is_refused = [](ContextConfig config) {
    config.segment_bytes = size_t{1} << 24;
    config.seal = true;
    try {
      const Context context(config);
      return false;
    } catch (const Fault& fault) {
      return fault.kind() == FaultKind::argument;
    }
  };
  ContextConfig config;
  config.secret = "short";
  check(is_refused(config), "a short secret is rejected");
  config.secret = kSecret;
  config.by_mpi = true;
  check(is_refused(config), "the mpi engine is rejected");
}

// Sums over sealed rails; with `cut_rail`, one of them falls silent.
void sums_over_rails(int cut_rail) {
  constexpr uint64_t kCount = 300'000;
  Job job(3, false, false, false, 2, 60, true);
  for (uint64_t turn = 0; turn < 8; ++turn) {
    if (turn == 4 && cut_rail >= 0) cut(cut_rail);
    job.in_parallel([&](int rank) {
      std::vector<int32_t> data(kCount, rank + static_cast<int>(turn));
      const auto operation =
          job[rank].post(spec_of(rank, 3, turn, direct_all_reduce(rank, 3, kCount, 2), data.data(), "sum"), true);
      wait_for(job[rank], operation);
      check(operation->fault() == FaultKind::none, "an all_reduce over sealed rails succeeds");
      check(data == std::vector<int32_t>(kCount, 3 + 3 * static_cast<int>(turn)), "it returns the sum");
    });
  }
  job.in_parallel([&](int rank) { job[rank].close(5, true); });
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t count = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 120;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  refuses_unfit();
  refuses_a_mixture();
  shows_nothing();
  for (const int rail : {-1, 0, 1}) sums_over_rails(rail);
  attacks(count, seed);
  return result();
}
