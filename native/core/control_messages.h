// Control messages: short messages between ranks outside any operation, and news of this rank's own for whoever listens
// here.
//
// What waits is bounded on both sides by what a rank may have sent and not seen taken: each taking is acknowledged.
// Guarded by RankState::mutex, which every caller holds: whichever thread drives or sends, and the one thread that
// takes.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "clock.h"
#include "link.h"

namespace multiring {

struct ControlMessage {
  enum class Kind : uint8_t {
    message = 0,   // `payload` of rank `rank`, to `group`, under `tag`
    mismatch = 1,  // an operation of `group` that tells of it, sequence number `tag`: what each rank called it
    loss = 2,      // rank `rank` is gone; `tag` is the LossKind, `payload` why
  };
  Kind kind;
  int rank = 0;  // in the world
  uint64_t group = 0;
  uint64_t tag = 0;
  std::string payload;
  std::map<int, std::string> titles;
};

class ControlMessages {
 public:
  struct Amount {
    uint64_t count = 0;
    uint64_t bytes = 0;
  };
  static constexpr Amount kMostWaiting{4096, 4 << 20};  // between two ranks, one way
  static constexpr size_t kMostOwn = 1 << 16;           // mismatches and losses

  // Sending. Whether one more of so many bytes may be sent to `peer`, and that it was, or was taken there.
  bool may_send(int peer, size_t bytes) const { return fits(waiting_there_, peer, bytes); }
  void note_sent(int peer, size_t bytes) { add(waiting_there_[peer], bytes); }
  void note_taken(int peer, Amount amount);
  Amount waiting_for(int peer) const;

  // Receiving. False: the peer has sent more than may wait.
  bool receive(int peer, const Frame& frame, std::span<const std::byte> payload);
  void tell(ControlMessage own);  // of this rank; one too many is lost, and `has_lost` from then on
  void wake(bool for_good = false);  // has `wait` return, once or always
  // Until something has come, `wake` was called, or it is `deadline`.
  void wait(std::unique_lock<std::mutex>& lock, Clock::time_point deadline);
  bool empty() const { return inbox_.empty(); }
  bool has_lost() const { return has_lost_; }
  struct Taken {
    std::vector<ControlMessage> messages;
    std::map<int, Amount> by_peer;  // to be acknowledged
  };
  Taken take();

 private:
  static bool fits(const std::map<int, Amount>& waiting, int peer, size_t bytes);
  static void add(Amount& amount, size_t bytes) {
    ++amount.count;
    amount.bytes += bytes;
  }

  std::deque<ControlMessage> inbox_;
  std::map<int, Amount> waiting_here_;
  std::map<int, Amount> waiting_there_;
  size_t own_ = 0;
  bool has_lost_ = false;
  std::condition_variable came_;
  bool is_woken_ = false;
  bool is_over_ = false;
};

}  // namespace multiring
