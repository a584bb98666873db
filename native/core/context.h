// One rank of a job: what the parts of its core offer to those outside.
//
// The parts: Peers (who there is, and what carries bytes), PeerConnector with SegmentHandover and Listeners (how they
// meet), OperationTable (what is in flight), OperationStarter and OperationDriver (how that begins and goes on),
// ProgressLoop with Sleepers (on which thread), FailureDetector and OperationFailures (who is gone, and what fails for
// it), FrameRouter (what links tell), ControlChannel, RailWatch, EventRecorder, Shutdown. All hang off one RankState,
// whose mutex guards their state; every function here takes it, so that any thread may call any of them. Nothing is
// global, so that tests can run ranks as threads.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "control_channel.h"
#include "control_messages.h"
#include "event_recorder.h"
#include "failure_detector.h"
#include "frame_router.h"
#include "mpi_proxy.h"
#include "operation_driver.h"
#include "operation_failures.h"
#include "operation_starter.h"
#include "operation_table.h"
#include "peer_connector.h"
#include "peers.h"
#include "progress_loop.h"
#include "rail_watch.h"
#include "rank_state.h"
#include "segment_handover.h"
#include "shutdown.h"
#include "sleepers.h"

namespace multiring {

class Context final : public OperationHost {
 public:
  explicit Context(ContextConfig config);
  ~Context() override;

  // Names and addresses to tell the other ranks. Every call of `listen` makes one more rail.
  const std::string& handover_name() const { return handover_.name(); }
  uint16_t listen(const std::string& host, uint16_t first_port, uint16_t last_port) {
    return connector_.listeners().listen(host, first_port, last_port);
  }

  // Maps every rank of this host and connects to `neighbours`. `local_ranks` lists this host's ranks, own one
  // included, the same on all of them. False: `interrupted` said to stop. Raises FaultKind::rendezvous.
  bool connect(const std::vector<PeerAddress>& peers, const std::vector<int>& local_ranks,
               const std::vector<int>& neighbours, double timeout_s, const std::function<bool()>& interrupted);

  // `caller_waits`: `wait` follows at once on this thread, so nobody else need be woken.
  std::shared_ptr<Operation> post(OperationSpec spec, bool caller_waits) {
    return starter_.post(std::move(spec), caller_waits);
  }
  // The blocking call again that `model` describes, on `data`, under the group's next sequence number: where all ranks
  // come within a few microseconds it is done when this returns. Else the operation, for `wait`; neither: nothing was
  // begun, because somebody is at work here or the operation cannot meet.
  using Attempt = OperationStarter::Attempt;
  Attempt meet(const OperationSpec& model, const CallSequence& sequence, std::byte* data) {
    return starter_.meet(model, sequence, data);
  }
  using Waited = ProgressLoop::Waited;
  Waited wait(const std::shared_ptr<Operation>& operation, double timeout_s) {
    return loop_.wait(operation, timeout_s);
  }
  bool has_ended(const Operation& operation);
  // Fails an operation in flight on all its ranks, as if `silent` had been silent for too long.
  void give_up(const std::shared_ptr<Operation>& operation, int silent);
  // The same, as rank `culprit` has aborted the group.
  void abort(const std::shared_ptr<Operation>& operation, int culprit);
  // Ranks the operation waits for and for how long nothing has moved.
  std::pair<std::vector<int>, double> stalled_on(const Operation& operation);

  std::vector<Event> take_events();
  uint64_t dropped_events();
  // Events again, those of a timeline: with reductions, and many more of them between two calls of take_timeline.
  void keep_timeline(bool keeps);
  std::vector<Event> take_timeline();
  uint64_t dropped_from_timeline();  // since keep_timeline
  std::map<int, Loss> losses();
  bool has_failed();           // a rank died or fell silent, or this one cannot go on
  std::vector<std::pair<int, uint64_t>> goodputs();  // bytes per second to ranks of other hosts, where known
  std::vector<RailStatus> rails();
  std::vector<RailLoss> take_rail_losses();  // since the last call
  std::vector<int> read_by();  // ranks of this host that can read this rank's ordinary memory
  std::shared_ptr<Segment> own_segment() const { return state_.segment; }

  size_t unexpected_frames();  // kept for operations that this rank has yet to post

  // True once nothing is in flight and every frame has been handed on; false after `timeout_s`.
  bool settled(double timeout_s) { return shutdown_.settled(timeout_s); }

  // Opens the connections with these ranks that are not there yet; the others do the same.
  void link_with(const std::vector<int>& ranks);
  // Sends a short message to a rank, outside any operation; as ControlChannel::send.
  bool notify(int rank, uint64_t group, uint64_t tag, std::span<const std::byte> payload) {
    return channel_.send(rank, group, tag, payload);
  }
  // What has come, and what is new here, as ControlChannel::take. For one thread.
  std::optional<std::vector<ControlMessage>> take_control_messages(double timeout_s) {
    return channel_.take(timeout_s);
  }
  void wake_control();  // has take_control_messages return

  // For the thread that calls MPI: work for it (see MpiProxy), what came of it, and peers MPI cannot reach any more.
  MpiProxy::Work collect(std::chrono::nanoseconds pause) { return proxy_.collect(pause); }
  void carried(const std::vector<uint64_t>& numbers);
  void cannot_reach(int peer, const std::string& why);

  // How long a blocked caller spins before it sleeps; 0, as at the start: not at all.
  void allow_spin(double seconds);

  // Lets operations in flight end for at most `grace_s`, and stops. `announce`: the other ranks are told that this one
  // left; without it they take its end for a death. Idempotent.
  void close(double grace_s, bool announce);

  // OperationHost
  Link& link(int peer) override { return connector_.link(peer); }
  Segment& segment() override { return *state_.segment; }
  uint64_t& staged_bytes() override { return table_.staged_bytes(); }
  int rank() const override { return state_.config.rank; }
  bool logs_moves() const override { return state_.config.log_moves; }
  bool lowers() const override { return state_.config.lower; }
  bool times_work() const override { return recorder_.keeps_timeline(); }
  bool shares_memory(int peer) const override { return peers_.is_local(peer) && !peers_.is_lost(peer); }

 private:
  void fail(const std::shared_ptr<Operation>& operation, int culprit, LossKind kind);
  template <typename Work>
  auto with_lock(Work work) const {
    const RankState::Lock lock(state_.mutex);
    return work();
  }

  RankState state_;
  MpiProxy proxy_;  // empty but for the mpi engine
  EventRecorder recorder_;
  ControlMessages control_;
  Sleepers sleepers_{state_};
  Peers peers_{state_};
  FailureDetector detector_{state_, peers_};
  OperationTable table_{state_, peers_, control_, recorder_};
  OperationFailures failures_{state_, peers_, detector_, table_, control_};
  FrameRouter router_{state_, peers_, detector_, table_, failures_, control_};
  SegmentHandover handover_{state_, peers_, detector_, router_};
  PeerConnector connector_{state_, peers_, handover_, router_, proxy_};
  ControlChannel channel_{state_, peers_, connector_, control_, sleepers_};
  RailWatch rails_{state_, peers_, recorder_};
  OperationDriver driver_{state_, peers_, connector_, detector_, table_, failures_};
  OperationStarter starter_{state_, *this, sleepers_, peers_, table_, failures_, driver_, router_};
  Shutdown shutdown_{state_, peers_, detector_, table_, failures_, control_, proxy_};
  ProgressLoop loop_{state_, sleepers_, peers_, connector_, rails_, table_, driver_, recorder_};
};

}  // namespace multiring
