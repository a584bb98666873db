// Connects this rank to the others: to its host's ranks and its neighbours at the start, to the rest on first use.
//
// RankState::mutex guards the state. `connect` locks the mutex itself; callers of all other functions hold it. The
// progress thread handles incoming connections; the thread that drives or posts makes links.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "links/handshake.h"
#include "listeners.h"
#include "memory/clock.h"
#include "peers.h"
#include "rank_state.h"
#include "segment_handover.h"

namespace multiring {

class PeerConnector {
 public:
  PeerConnector(RankState& state, Peers& peers, SegmentHandover& handover, LinkEvents& events, MpiProxy& proxy)
      : state_(state), peers_(peers), handover_(handover), events_(events), proxy_(proxy),
        listeners_(state, [this](Handshake& handshake) { on_proven(handshake); }) {}

  Listeners& listeners() { return listeners_; }

  // The ranks that must be connected before `connect` returns.
  struct Meeting {
    const std::vector<PeerAddress>& peers;
    const std::vector<int>& local_ranks;
    const std::vector<int>& neighbours;
    double timeout_s;
    const std::function<bool()>& interrupted;
  };
  // Connects the ranks of `meeting` and calls `drive` while it waits. Returns false if `interrupted` returned true.
  // Throws FaultKind::rendezvous.
  bool connect(const Meeting& meeting, const std::function<void()>& drive);

  Link& link(int peer) {  // returns the link to `peer`; makes it if there is none
    Link* known = peers_.link(peer);
    if (known == nullptr) make_link(peer);
    return *peers_.link(peer);
  }
  void link_with(const std::vector<int>& ranks);  // makes missing links; those ranks must do the same

  bool waits_for_time() const { return listeners_.waits_for_time() || peers_.is_calling(); }
  void tend();  // repeats calls that peers turned away, and ends a pause of the listeners

 private:
  bool await_links(const Meeting& meeting, Clock::time_point deadline, const std::function<void()>& drive);
  std::vector<int> missing(const std::vector<int>& local_ranks) const;
  void check_rails() const;
  TcpLink& make_link(int peer);
  TcpLink& add_link(int peer);
  void on_proven(Handshake& handshake);

  RankState& state_;
  Peers& peers_;
  SegmentHandover& handover_;
  LinkEvents& events_;
  MpiProxy& proxy_;
  const std::shared_ptr<PayloadPool> pool_ = std::make_shared<PayloadPool>();
  Listeners listeners_;
};

}  // namespace multiring
