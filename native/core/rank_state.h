// What all parts of one rank's core share: who the rank is, its memory, and the mutex that guards their state.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "descriptor.h"
#include "fault.h"
#include "poller.h"
#include "segment.h"

namespace multiring {

struct ContextConfig {
  int rank = 0;
  int size = 1;
  std::string job;     // the same on every rank of the job, in no other job
  std::string secret;  // shared by the job's ranks
  size_t segment_bytes = size_t{1} << 36;
  double stall_warn_s = 60;
  double stall_timeout_s = 1800;
  bool log_moves = false;
  bool lower = true;         // false: every program runs move by move
  bool read_peers = true;    // false: ordinary memory goes through staging slots, as where the kernel forbids reading
  bool by_mpi = false;       // payload between hosts is carried by MPI: somebody must call collect and carried
  double rail_timeout_s = 2;  // a rail that is silent for so long while another works is given up
  double wire_timeout_s = 60;  // a host from which nothing comes, though it was asked, is cut off at the latest then
};

// `mutex` guards everything that is not const here, and the state of every part that says so in its head. `changed` is
// told of each operation that ends and each peer that comes or goes; `poller` is waited at by the progress thread
// alone.
struct RankState {
  using Lock = std::unique_lock<std::mutex>;

  explicit RankState(ContextConfig from)
      : config(std::move(from)), segment(std::make_shared<Segment>(config.segment_bytes)) {}

  void refuse_inherited() const {
    if (!origin.is_inherited()) return;
    throw Fault(FaultKind::state, "this process was forked from a rank; only the rank may communicate");
  }

  const Origin origin;
  const ContextConfig config;
  const std::shared_ptr<Segment> segment;
  Poller poller;

  mutable std::mutex mutex;
  std::condition_variable changed;
  bool connected = false;
  bool closing = false;
  bool stopped = false;
  std::string broken;  // what went wrong on the progress thread; nothing can be relied on after it
};

}  // namespace multiring
