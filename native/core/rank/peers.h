// The other ranks: their addresses, the links to them, and the losses among them.
//
// RankState::mutex guards the state. Every caller holds it: the progress thread, and callers that drive, post or query.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "links/mpi_link.h"
#include "links/shm_link.h"
#include "links/tcp_link.h"
#include "memory/shared_slots.h"
#include "rank_state.h"

namespace multiring {

struct RailAddress {
  std::string host;
  uint16_t port = 0;
};

// The addresses at which a rank can be reached.
struct PeerAddress {
  int rank = 0;
  bool same_host = false;
  std::string handover;            // same host: the name of its abstract socket
  std::vector<RailAddress> rails;  // other host: one TCP address per rail
  std::string host{};              // text for messages that names the host and its ranks
};

struct Loss {
  LossKind kind;
  std::string why;
};

class Peers {
 public:
  explicit Peers(const RankState& state) : state_(state), links_(static_cast<size_t>(state.config.size)) {}

  // Sets the addresses of the other ranks. `local_ranks`: the ranks of this host, including this rank. Throws
  // Fault::argument if this rank is missing.
  void know(const std::vector<PeerAddress>& addresses, const std::vector<int>& local_ranks);
  const PeerAddress* address_of(int rank) const;  // null if unknown
  const std::string& place_of(int rank) const;    // text such as "host1 (ranks 4-7)"
  const std::vector<int>& local_ranks() const { return local_ranks_; }
  bool is_local(int rank) const {
    return std::find(local_ranks_.begin(), local_ranks_.end(), rank) != local_ranks_.end();
  }
  uint32_t local_index_of(int rank) const;  // position among the ranks of this host

  // Links.
  void add(std::unique_ptr<ShmLink> link);
  TcpLink& add(std::unique_ptr<TcpLink> link);
  TcpLink& add(std::unique_ptr<MpiLink> link);  // returns the link's TCP connection
  Link* link(int rank) const { return links_[static_cast<size_t>(rank)].get(); }  // null if there is no link yet
  TcpLink* connection(int rank) const;                                            // null if there is none
  MpiLink* by_mpi(int rank) const;                                                // null if there is none
  const std::map<int, TcpLink*>& connections() const { return tcp_links_; }       // including those of mpi links
  bool receive_local();  // handles all frames from ranks of this host; true if there were any
  bool pump();           // pumps all links; true if anything was sent
  void pump_local();
  bool congested() const;  // true if frames wait for room that no event will announce
  bool hands_on() const;   // true if frames wait for a connection, or for the kernel to accept them
  bool is_sending() const;  // the same, without frames that wait for a connection
  size_t in_transit() const;  // bytes that the kernel has accepted and the peers' kernels have not acknowledged
  bool is_calling() const;
  void tell_everyone(const Frame& frame);
  void wake_waiting(const SharedSlots& slots) const {  // wakes local ranks that may wait for this rank's slot
    slots.wake_waiting([this](int rank) {
      for (const ShmLink* link : local_links_) {
        if (link != nullptr && link->peer() == rank) link->wake();
      }
    });
  }

  // Losses.
  bool is_lost(int rank) const { return losses_.contains(rank); }
  const std::map<int, Loss>& losses() const { return losses_; }
  const std::vector<int>& lost_in_order() const { return lost_in_order_; }  // in the order of their detection
  bool lose(int rank, const Loss& loss);  // records a loss; false if the rank was already lost
  bool any_died() const;

  std::vector<std::pair<int, uint64_t>> goodputs() const;  // (rank, bytes per second), if known
  std::vector<RailStatus> rails() const;
  std::vector<int> read_by() const;  // ranks of this host that can read this rank's ordinary memory
  void drop_links();

 private:
  const RankState& state_;
  std::map<int, PeerAddress> addresses_;
  std::vector<int> local_ranks_;
  std::vector<std::unique_ptr<Link>> links_;  // by rank; null if there is no link yet
  std::vector<ShmLink*> local_links_;         // by local index
  std::map<int, TcpLink*> tcp_links_;
  std::map<int, MpiLink*> mpi_links_;
  std::map<int, Loss> losses_;
  std::vector<int> lost_in_order_;
};

}  // namespace multiring
