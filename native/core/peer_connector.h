// How this rank meets the others: at the start those of its host and its neighbours, the rest when they are needed.
//
// Guarded by RankState::mutex, which `connect` takes itself and every other caller holds: the progress thread hears who
// called, whichever thread drives or posts makes links.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "clock.h"
#include "handshake.h"
#include "listeners.h"
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

  // Whom a rank is to meet before it goes on.
  struct Meeting {
    const std::vector<PeerAddress>& peers;
    const std::vector<int>& local_ranks;
    const std::vector<int>& neighbours;
    double timeout_s;
    const std::function<bool()>& interrupted;
  };
  // False: `interrupted` said to stop. Raises FaultKind::rendezvous. `drive` does meanwhile what can be done.
  bool connect(const Meeting& meeting, const std::function<void()>& drive);

  Link& link(int peer) {  // made, if there is none yet
    Link* known = peers_.link(peer);
    if (known == nullptr) make_link(peer);
    return *peers_.link(peer);
  }
  void link_with(const std::vector<int>& ranks);  // the others do the same

  bool waits_for_time() const { return listeners_.waits_for_time() || peers_.is_calling(); }
  void tend();  // calls again who was turned away, and listens again after a rest

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
