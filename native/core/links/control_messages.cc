#include "control_messages.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace multiring {

bool ControlMessages::fits(const std::map<int, Amount>& waiting, int peer, size_t bytes) {
  const auto found = waiting.find(peer);
  const Amount amount = found == waiting.end() ? Amount{} : found->second;
  return amount.count < kMostWaiting.count && amount.bytes + bytes <= kMostWaiting.bytes;
}

void ControlMessages::note_taken(int peer, Amount amount) {
  Amount& waiting = waiting_there_[peer];
  waiting.count -= std::min(waiting.count, amount.count);
  waiting.bytes -= std::min(waiting.bytes, amount.bytes);
}

ControlMessages::Amount ControlMessages::waiting_for(int peer) const {
  const auto found = waiting_there_.find(peer);
  return found == waiting_there_.end() ? Amount{} : found->second;
}

bool ControlMessages::receive(int peer, const Frame& frame, std::span<const std::byte> payload) {
  if (!fits(waiting_here_, peer, payload.size())) return false;
  add(waiting_here_[peer], payload.size());
  inbox_.push_back({ControlMessageKind::message, peer, frame.group, frame.sequence,
                    {reinterpret_cast<const char*>(payload.data()), payload.size()}, {}});
  came_.notify_one();
  return true;
}

void ControlMessages::tell(ControlMessage own) {
  if (own_ == kMostOwn) {
    has_lost_ = true;
    came_.notify_one();
    return;
  }
  ++own_;
  inbox_.push_back(std::move(own));
  came_.notify_one();
}

void ControlMessages::wake(bool for_good) {
  is_woken_ = true;
  is_over_ |= for_good;
  came_.notify_all();
}

void ControlMessages::wait(std::unique_lock<std::mutex>& lock, Clock::time_point deadline) {
  came_.wait_until(lock, deadline, [this] { return is_over_ || is_woken_ || !inbox_.empty(); });
  is_woken_ = false;
}

ControlMessages::Taken ControlMessages::take() {
  own_ = 0;
  auto all = std::exchange(inbox_, {});
  return {{std::make_move_iterator(all.begin()), std::make_move_iterator(all.end())}, std::exchange(waiting_here_, {})};
}

}  // namespace multiring
