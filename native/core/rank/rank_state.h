// State shared by all parts of one rank's core: its configuration, its memory, and the mutex that guards the parts.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "links/link_thread.h"
#include "memory/descriptor.h"
#include "memory/fault.h"
#include "memory/poller.h"
#include "memory/segment.h"

namespace multiring {

struct ContextConfig {
  int rank = 0;
  int size = 1;
  std::string job;     // the job's name: equal on all its ranks, different in every other job
  std::string secret;  // known to the job's ranks only
  size_t segment_bytes = size_t{1} << 36;
  double stall_warn_s = 60;
  double stall_timeout_s = 1800;
  bool log_moves = false;
  bool lower = true;       // false: every program runs move by move
  bool read_peers = true;  // false: ordinary memory goes through staging slots, as if the kernel forbade reading it
  bool by_mpi = false;     // MPI carries payload between hosts; a thread must call `collect` and `carried`
  double rail_timeout_s = 2;   // a rail that is silent for so long while another rail works is abandoned
  double wire_timeout_s = 60;  // a host that has not answered probes for so long is cut off
  bool seal = false;  // encrypt and authenticate connections to other hosts
  bool own_losses_only = false;  // believe no other rank that a third one is lost, because the ranks vote on it
};

// `mutex` guards every non-const member, and the state of each part whose header says so. `changed` is notified when an
// operation ends and when a peer connects or is lost. Only the progress thread waits on `poller`.
struct RankState {
  using Lock = std::unique_lock<std::mutex>;

  explicit RankState(ContextConfig from)
      : config(std::move(from)), segment(std::make_shared<Segment>(config.segment_bytes)) {}

  void refuse_inherited() const {  // throws Fault::state in a forked child
    if (!origin.is_inherited()) return;
    throw Fault(FaultKind::state, "this process was forked from a rank; only the rank may communicate");
  }

  // The number of connections of each rail to a rank of another host.
  uint16_t connections() const { return static_cast<uint16_t>(std::max<size_t>(1, link_threads.size())); }

  const Origin origin;
  const ContextConfig config;
  const std::shared_ptr<Segment> segment;
  Poller poller;

  mutable std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::unique_ptr<LinkThread>> link_threads;  // empty if a rail has one connection
  bool connected = false;
  bool closing = false;
  bool stopped = false;
  std::string broken;  // why this rank cannot communicate any more; empty while it can
};

}  // namespace multiring
