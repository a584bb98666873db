// The other ranks: where each can be met, what carries bytes between it and this one, and which are gone.
//
// Guarded by RankState::mutex, which every caller holds: the progress thread, and callers that drive, post or ask.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "mpi_link.h"
#include "rank_state.h"
#include "shared_slots.h"
#include "shm_link.h"
#include "tcp_link.h"

namespace multiring {

struct RailAddress {
  std::string host;
  uint16_t port = 0;
};

// Where a rank can be met.
struct PeerAddress {
  int rank = 0;
  bool same_host = false;
  std::string handover;  // abstract socket name (same host)
  std::vector<RailAddress> rails;  // tcp
  std::string host{};              // in words, with the ranks that are on it
};

struct Loss {
  LossKind kind;
  std::string why;
};

class Peers {
 public:
  explicit Peers(const RankState& state) : state_(state), links_(static_cast<size_t>(state.config.size)) {}

  // Where they are. `local_ranks`: of this host, this one among them, or it is refused.
  void know(const std::vector<PeerAddress>& addresses, const std::vector<int>& local_ranks);
  const PeerAddress* address_of(int rank) const;  // null: not known
  const std::string& place_of(int rank) const;    // "host1 (ranks 4-7)"
  const std::vector<int>& local_ranks() const { return local_ranks_; }
  bool is_local(int rank) const {
    return std::find(local_ranks_.begin(), local_ranks_.end(), rank) != local_ranks_.end();
  }
  uint32_t local_index_of(int rank) const;  // among the ranks of this host

  // What carries bytes.
  void add(std::unique_ptr<ShmLink> link);
  TcpLink& add(std::unique_ptr<TcpLink> link);
  TcpLink& add(std::unique_ptr<MpiLink> link);  // its connection
  Link* link(int rank) const { return links_[static_cast<size_t>(rank)].get(); }  // null: none yet
  TcpLink* connection(int rank) const;                                            // null: none
  MpiLink* by_mpi(int rank) const;                                                // null: none
  const std::map<int, TcpLink*>& connections() const { return tcp_links_; }       // also those inside of mpi links
  bool receive_local();  // takes every frame that ranks of this host have sent; true if there was one
  bool pump();           // of all links; true if anything moved
  void pump_local();
  bool congested() const;  // frames wait for room that nobody announces
  bool hands_on() const;   // frames wait for ranks that have yet to connect
  bool is_calling() const;
  void tell_everyone(const Frame& frame);
  void wake_waiting(const SharedSlots& slots) const {  // those that wait for what was published
    slots.wake_waiting([this](int rank) {
      for (const ShmLink* link : local_links_) {
        if (link != nullptr && link->peer() == rank) link->wake();
      }
    });
  }

  // Who is gone.
  bool is_lost(int rank) const { return losses_.contains(rank); }
  const std::map<int, Loss>& losses() const { return losses_; }
  const std::vector<int>& lost_in_order() const { return lost_in_order_; }  // as was learned of them
  bool lose(int rank, const Loss& loss);                                    // false: known already
  bool any_died() const;

  std::vector<std::pair<int, uint64_t>> goodputs() const;  // bytes per second, where known
  std::vector<RailStatus> rails() const;
  std::vector<int> read_by() const;  // ranks of this host that can read this rank's ordinary memory
  void drop_links();

 private:
  const RankState& state_;
  std::map<int, PeerAddress> addresses_;
  std::vector<int> local_ranks_;
  std::vector<std::unique_ptr<Link>> links_;  // by rank; null: none yet
  std::vector<ShmLink*> local_links_;         // by local index
  std::map<int, TcpLink*> tcp_links_;
  std::map<int, MpiLink*> mpi_links_;
  std::map<int, Loss> losses_;
  std::vector<int> lost_in_order_;
};

}  // namespace multiring
