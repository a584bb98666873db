#include "failure_detector.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <utility>

namespace multiring {
namespace {

// After the end of a rank is detected, its last messages arrive within about this time.
constexpr auto kLastWords = std::chrono::milliseconds(100);
constexpr auto kGossip = std::chrono::seconds(3);  // by then this host's kernel has received all messages of the rank

std::string found_by(int peer) { return "as rank " + std::to_string(peer) + " reported"; }

}  // namespace

void FailureDetector::watch(int peer, Descriptor socket) {
  const int fd = socket.get();
  watches_[peer] = std::move(socket);
  state_.poller.add(fd, EPOLLIN | EPOLLRDHUP, [this, peer](uint32_t) { on_watch_ready(peer); });
}

void FailureDetector::say_leaving() {
  for (const auto& [rank, socket] : watches_) {
    [[maybe_unused]] const auto sent = ::send(socket.get(), "L", 1, MSG_NOSIGNAL | MSG_DONTWAIT);
  }
}

void FailureDetector::on_watch_ready(int peer) {
  const auto found = watches_.find(peer);
  if (found == watches_.end()) return;
  char word = 0;
  const ssize_t got = ::recv(found->second.get(), &word, 1, MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got > 0) {
    on_loss(peer, LossKind::left, "it ended normally or called shutdown");
    return;
  }
  state_.poller.remove(found->second.get());
  watches_.erase(found);
  on_loss(peer, LossKind::died, "its process ended");
}

void FailureDetector::on_loss(int peer, LossKind kind, const std::string& why) {
  note_loss(peer, kind, kind == LossKind::cut_off ? "nothing has come from " + peers_.place_of(peer) + " " + why : why);
}

void FailureDetector::note_loss(int lost, LossKind kind, const std::string& why) {
  new_losses_.push_back({lost, {kind, why}, Clock::now()});
  state_.changed.notify_all();  // a closing thread waits until the peers have hung up
}

void FailureDetector::on_lost(int peer, const Frame& frame) {
  const auto lost = static_cast<int>(frame.offset);
  const auto kind = static_cast<LossKind>(frame.slot);
  if (lost < 0 || lost >= state_.config.size) return;
  if (lost == state_.config.rank) {
    if (kind == LossKind::cut_off) on_exclusion(peer);
    return;
  }
  // A report from another rank must not overtake the messages that the lost rank sent on its own connection.
  if (lost != peer && kind == LossKind::left) {
    const TcpLink* own = peers_.connection(lost);
    if (own != nullptr && own->is_open()) return;
    // If the rank has connected only recently, its messages may still be in transit.
    if (!peers_.is_local(lost) && !peers_.is_lost(lost)) {
      gossip_.try_emplace(lost, Clock::now() + kGossip, found_by(peer));
      return;
    }
  }
  on_cause(peer, {lost, kind, 0});
}

// Ranks that vote on who goes on each say whom they cannot reach themselves. If they believed reports, a rank that was
// cut off, and whose wire is joined again, would part ranks that reach each other. The launcher tells which ranks died.
void FailureDetector::on_cause(int peer, const FailureCause& cause) {
  if (state_.config.own_losses_only && is_death(cause.kind) && cause.rank != peer) return;
  const bool is_cut_off = cause.kind == LossKind::cut_off;
  note_loss(cause.rank, cause.kind,
            is_cut_off ? "nothing comes from " + peers_.place_of(cause.rank) + " any more, " + found_by(peer)
                       : found_by(peer));
}

// This rank is alive, but `peer` receives nothing from it and treats it as cut off. This rank learns that from other
// ranks, or over a wire that works in one direction. The loss of `peer` that it records is not passed on, because the
// other ranks can still reach `peer`.
void FailureDetector::on_exclusion(int peer) {
  new_losses_.push_back({peer,
                         {LossKind::cut_off, "nothing from this rank comes to " + peers_.place_of(peer) + " any more"},
                         Clock::now(), false});
  state_.changed.notify_all();
}

// Accepts the reports about ranks whose own connections are closed or never existed.
void FailureDetector::believe_gossip(Clock::time_point now) {
  for (auto at = gossip_.begin(); at != gossip_.end();) {
    const auto& [lost, said] = *at;
    const TcpLink* own = peers_.connection(lost);
    if (peers_.is_lost(lost)) {
      at = gossip_.erase(at);
    } else if (now < said.believed_at || (own != nullptr && own->is_open())) {
      ++at;
    } else {
      note_loss(lost, LossKind::left, said.why);
      at = gossip_.erase(at);
    }
  }
}

size_t FailureDetector::heard_out(bool anything_moves) const {
  if (!anything_moves) return new_losses_.size();
  const auto since = Clock::now() - kLastWords;
  const auto end = std::find_if(new_losses_.begin(), new_losses_.end(),
                                [&](const NewLoss& each) { return each.found > since; });
  return static_cast<size_t>(end - new_losses_.begin());
}

std::vector<NewLoss> FailureDetector::take(size_t count) {
  const auto end = new_losses_.begin() + static_cast<std::ptrdiff_t>(count);
  std::vector<NewLoss> taken(std::make_move_iterator(new_losses_.begin()), std::make_move_iterator(end));
  new_losses_.erase(new_losses_.begin(), end);
  return taken;
}

}  // namespace multiring
