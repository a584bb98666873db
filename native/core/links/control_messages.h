// Control messages: short messages between ranks outside any operation, and this rank's own notifications to its
// listening thread.
//
// The receiver acknowledges the messages that it takes. A sender may have only a bounded amount of unacknowledged
// messages, so the queues on both sides are bounded. RankState::mutex guards the state. Every caller holds the mutex:
// the driving thread, callers that send, and the one thread that takes.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "link.h"
#include "memory/clock.h"

namespace multiring {

enum class ControlMessageKind : uint8_t {
  message = 0,   // rank `rank` sent `payload` to `group` with the tag `tag`
  mismatch = 1,  // the operation with the sequence number `tag` of `group` mismatched; `titles` are the descriptions
  loss = 2,      // rank `rank` is lost; `tag` is the LossKind, `payload` the reason
};

struct ControlMessage {
  ControlMessageKind kind;
  int rank = 0;  // a world rank
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
  static constexpr Amount kMostWaiting{4096, 4 << 20};  // unacknowledged messages from one rank to another
  static constexpr size_t kMostOwn = 1 << 16;           // queued mismatches and losses of this rank

  // Sending. `may_send` returns whether the limit permits a message of `bytes` to `peer`. Call `note_sent` after
  // sending, and `note_taken` after an acknowledgement.
  bool may_send(int peer, size_t bytes) const { return fits(waiting_there_, peer, bytes); }
  void note_sent(int peer, size_t bytes) { add(waiting_there_[peer], bytes); }
  void note_taken(int peer, Amount amount);
  Amount waiting_for(int peer) const;

  // Receiving. `receive` returns false if the peer exceeded the limit of unacknowledged messages.
  bool receive(int peer, const Frame& frame, std::span<const std::byte> payload);
  void tell(ControlMessage own);  // queues a notification of this rank; beyond kMostOwn, drops it and sets `has_lost`
  void wake(bool for_good = false);  // makes `wait` return, once or from now on
  // Returns when a message is available, `wake` was called, or `deadline` has passed.
  void wait(std::unique_lock<std::mutex>& lock, Clock::time_point deadline);
  bool empty() const { return inbox_.empty(); }
  bool has_lost() const { return has_lost_; }
  struct Taken {
    std::vector<ControlMessage> messages;
    std::map<int, Amount> by_peer;  // the caller must acknowledge these
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
