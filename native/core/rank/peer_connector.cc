#include "peer_connector.h"

#include <algorithm>
#include <utility>

namespace multiring {
namespace {

constexpr double kCallTimeout_s = 30;

}  // namespace

bool PeerConnector::connect(const Meeting& meeting, const std::function<void()>& drive) {
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                           std::chrono::duration<double>(meeting.timeout_s));
  const auto& local_ranks = meeting.local_ranks;
  const auto& neighbours = meeting.neighbours;
  if (local_ranks.size() > kMaxLocalRanks) {
    throw Fault(FaultKind::argument, std::to_string(local_ranks.size()) + " ranks on one host, at most " +
                                         std::to_string(kMaxLocalRanks) + " fit");
  }
  {
    const RankState::Lock lock(state_.mutex);
    peers_.know(meeting.peers, local_ranks);
    // Only after the ranks' addresses are known can this rank distinguish its peers from other callers.
    handover_.open();
    listeners_.open();
    state_.poller.wake();
  }
  for (const int peer : local_ranks) {
    const bool keeps = std::find(neighbours.begin(), neighbours.end(), peer) != neighbours.end();
    const bool calls = peer > state_.config.rank;
    if (calls && !handover_.map_from(*peers_.address_of(peer), keeps, deadline, meeting.interrupted)) return false;
    if (meeting.interrupted()) return false;
  }
  return await_links(meeting, deadline, drive);
}

bool PeerConnector::await_links(const Meeting& meeting, Clock::time_point deadline,
                                const std::function<void()>& drive) {
  RankState::Lock lock(state_.mutex);
  for (const int peer : meeting.neighbours) {
    if (!peers_.is_local(peer)) link(peer);
  }
  for (auto ranks = missing(meeting.local_ranks); !ranks.empty(); ranks = missing(meeting.local_ranks)) {
    drive();
    if (!state_.broken.empty()) throw Fault(FaultKind::rendezvous, state_.broken);
    for (const int rank : ranks) {
      const auto loss = peers_.losses().find(rank);
      if (loss != peers_.losses().end()) {
        throw Fault(FaultKind::rendezvous, "no connection with rank " + std::to_string(rank) + ": " + loss->second.why);
      }
    }
    if (Clock::now() >= deadline) {
      throw Fault(FaultKind::rendezvous, "no connection with rank " + std::to_string(ranks.front()) + " within " +
                                             std::to_string(static_cast<int64_t>(meeting.timeout_s)) + " s");
    }
    state_.changed.wait_for(lock, std::chrono::milliseconds(5));
    lock.unlock();
    const bool stop = meeting.interrupted();
    lock.lock();
    if (stop) return false;
  }
  check_rails();
  state_.connected = true;
  handover_.close();
  return true;
}

std::vector<int> PeerConnector::missing(const std::vector<int>& local_ranks) const {
  std::vector<int> ranks;
  for (const int peer : local_ranks) {
    if (peer != state_.config.rank && peers_.link(peer) == nullptr) ranks.push_back(peer);
  }
  for (const auto& [peer, link] : peers_.connections()) {
    if (!link->established()) ranks.push_back(peer);
  }
  return ranks;
}

void PeerConnector::check_rails() const {
  for (const auto& [peer, link] : peers_.connections()) {
    for (const uint16_t rail : link->rails_not_up()) {
      const size_t at = state_.link_threads.empty() ? rail : 0;
      throw Fault(FaultKind::rendezvous, "no connection with rank " + std::to_string(peer) + " over rail " +
                                             std::to_string(at) + ", from " + listeners_.host(at) + " to " +
                                             peers_.address_of(peer)->rails[at].host);
    }
  }
}

void PeerConnector::link_with(const std::vector<int>& ranks) {
  for (const int rank : ranks) {
    if (rank != state_.config.rank && !peers_.is_lost(rank)) link(rank);
  }
}

TcpLink& PeerConnector::make_link(int peer) {
  const PeerAddress* found = peers_.address_of(peer);
  const size_t rails = listeners_.size();
  if (found == nullptr || found->rails.empty() || found->rails.size() != rails) {
    throw Fault(FaultKind::state, "rank " + std::to_string(peer) + " gave no address to connect to");
  }
  if (rails > 1 && !state_.link_threads.empty()) {
    throw Fault(FaultKind::argument, "MULTIRING_CONNECTIONS=" + std::to_string(state_.connections()) + " with " +
                                         std::to_string(rails) + " rails: want one rail, or one connection");
  }
  TcpLink& made = add_link(peer);
  // The lower rank calls, and the higher rank waits for the call.
  if (state_.config.rank < peer) {
    const auto deadline = Clock::now() + as_duration(kCallTimeout_s);
    for (uint16_t rail = 0; rail < rails; ++rail) {
      const auto& [host, port] = found->rails[rail];
      for (uint16_t i = 0; i < state_.connections(); ++i) {
        const auto index = static_cast<uint16_t>(rail * state_.connections() + i);
        made.call(index, host, port, rails > 1 ? listeners_.host(rail) : "", listeners_.self_on(index), deadline);
      }
    }
  }
  return made;
}

TcpLink& PeerConnector::add_link(int peer) {
  const ContextConfig& config = state_.config;
  const TcpLink::Rails rails{static_cast<uint16_t>(listeners_.size()), as_duration(config.rail_timeout_s),
                             as_duration(config.wire_timeout_s), pool_, state_.link_threads};
  if (config.by_mpi) return peers_.add(std::make_unique<MpiLink>(peer, events_, state_.poller, rails, proxy_));
  return peers_.add(std::make_unique<TcpLink>(peer, events_, state_.poller, rails));
}

void PeerConnector::on_proven(Handshake& handshake) {
  const int peer = handshake.peer();
  const PeerAddress* known = peers_.address_of(peer);
  if (peer >= state_.config.rank || known == nullptr || known->same_host) return;
  TcpLink& mine = peers_.link(peer) != nullptr ? *peers_.connection(peer) : make_link(peer);
  const uint16_t rail = handshake.rail();
  if (mine.awaits(rail) && !peers_.is_lost(peer)) mine.adopt(rail, handshake.release(), handshake.release_stream());
  state_.changed.notify_all();
}

void PeerConnector::tend() {
  if (peers_.is_calling()) {
    for (const auto& [rank, link] : peers_.connections()) link->tend_calls();
  }
  listeners_.tend();
}

}  // namespace multiring
