// One rank of a job: the public interface of the core.
//
// Its parts: Peers (the other ranks and their links); PeerConnector with SegmentHandover and Listeners (connections);
// OperationTable (operations in flight); OperationStarter and OperationDriver (they start and advance operations);
// ProgressLoop and LinkThreads with Sleepers (threads); FailureDetector and OperationFailures (lost ranks and failed operations);
// FrameRouter (incoming frames); ControlChannel; RailWatch; EventRecorder; Shutdown. All parts share one RankState,
// whose mutex guards their state. Every function here locks the mutex, so any thread may call any function. There is no
// global state, so tests can run ranks as threads. The driving thread, which advances operations, is the progress
// thread or a waiting caller (see Sleepers).
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
#include "event_recorder.h"
#include "failure_detector.h"
#include "frame_router.h"
#include "link_threads.h"
#include "links/control_messages.h"
#include "links/mpi_proxy.h"
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

  // The name and the addresses that the other ranks need. Every call of `listen` adds a rail and returns its port.
  const std::string& handover_name() const { return handover_.name(); }
  uint16_t listen(const std::string& host, uint16_t first_port, uint16_t last_port) {
    return connector_.listeners().listen(host, first_port, last_port);
  }

  // Divides each rail to another host into `count` connections, each with a thread. Call it at most once, before
  // `connect`; all ranks must do the same. Throws FaultKind::argument.
  void use_connections(uint16_t count);

  // Maps the segments of all ranks of this host and connects to `neighbours`. `local_ranks` lists this host's ranks,
  // including this rank, in the same order on all of them. Returns false if `interrupted` returned true. Throws
  // FaultKind::rendezvous.
  bool connect(const std::vector<PeerAddress>& peers, const std::vector<int>& local_ranks,
               const std::vector<int>& neighbours, double timeout_s, const std::function<bool()>& interrupted);

  // Starts an operation. `caller_waits`: this thread calls `wait` next, so no other thread needs to be woken.
  std::shared_ptr<Operation> post(OperationSpec spec, bool caller_waits) {
    return starter_.post(std::move(spec), caller_waits);
  }
  // Repeats the blocking call that `model` describes on `data`, with the group's next sequence number. If all ranks
  // arrive within a few microseconds, the call is done on return. Otherwise the result holds the operation to `wait`
  // for. If it is neither done nor holds an operation, nothing was started: another thread holds the mutex, or the
  // operation cannot run in the slots.
  using MeetResult = OperationStarter::MeetResult;
  MeetResult meet(const OperationSpec& model, const CallSequence& sequence, std::byte* data) {
    return starter_.meet(model, sequence, data);
  }
  using Waited = ProgressLoop::Waited;
  Waited wait(const std::shared_ptr<Operation>& operation, double timeout_s) {
    return loop_.wait(operation, timeout_s);
  }
  bool has_ended(const Operation& operation);
  // Fails an operation in flight on all its ranks, as if rank `silent` had been silent for too long.
  void give_up(const std::shared_ptr<Operation>& operation, int silent);
  // Fails an operation in flight on all its ranks, because rank `culprit` has aborted the group.
  void abort(const std::shared_ptr<Operation>& operation, int culprit);
  // Returns the ranks that the operation waits for, and the seconds since anything moved.
  std::pair<std::vector<int>, double> stalled_on(const Operation& operation);

  std::vector<Event> take_events();  // events since the last call, at most the newest 65536
  uint64_t dropped_events();         // events dropped since the start
  // Starts or stops recording a timeline. A timeline also contains reductions, and its buffer is larger than that of
  // `take_events`.
  void keep_timeline(bool keeps);
  std::vector<Event> take_timeline();
  uint64_t dropped_from_timeline();  // events dropped since keep_timeline
  std::map<int, Loss> losses();
  bool has_failed();  // true if a rank died, a group was aborted or stalled, or this rank cannot communicate any more
  std::vector<std::pair<int, uint64_t>> goodputs();  // (rank, bytes per second) for ranks of other hosts, if known
  std::vector<RailStatus> rails();
  std::vector<RailLoss> take_rail_losses();  // rails lost since the last call
  std::vector<int> read_by();  // the ranks of this host that can read this rank's ordinary memory
  std::shared_ptr<Segment> own_segment() const { return state_.segment; }
  // Gives a group's slots to the next group; see SharedSlots::recycle.
  void recycle(SharedSlots& slots) {
    const RankState::Lock lock(state_.mutex);
    slots.recycle(*state_.segment);
  }

  size_t unexpected_frames();  // number of frames kept for operations that this rank has not posted yet

  // Waits until no operation is in flight and every frame has been sent. Returns false after `timeout_s` seconds.
  bool settled(double timeout_s) { return shutdown_.settled(timeout_s); }

  // Opens the missing connections with these ranks. Those ranks must call this function, too.
  void link_with(const std::vector<int>& ranks);
  // Sends a short message to a rank, outside any operation. See ControlChannel::send.
  bool notify(int rank, uint64_t group, uint64_t tag, std::span<const std::byte> payload) {
    return channel_.send(rank, group, tag, payload);
  }
  // Waits for control messages. Only one thread may call this function. See ControlChannel::take.
  std::optional<std::vector<ControlMessage>> take_control_messages(double timeout_s) {
    return channel_.take(timeout_s);
  }
  void wake_control();  // makes take_control_messages return

  // For the thread that calls MPI (see MpiProxy). `collect` returns its work, `carried` reports finished bounce
  // buffers, and `cannot_reach` reports a peer that MPI cannot reach any more.
  MpiProxy::Work collect(std::chrono::nanoseconds pause) { return proxy_.collect(pause); }
  void carried(const std::vector<uint64_t>& numbers);
  void cannot_reach(int peer, const std::string& why);

  // Sets how many seconds a blocked caller spins before it sleeps. The default is 0.
  void allow_spin(double seconds);

  // Waits at most `grace_s` seconds for operations in flight, then stops the rank. `announce`: informs the other ranks
  // that this rank leaves; otherwise they treat its end as a death. Idempotent.
  void close(double grace_s, bool announce);

  // Implementation of OperationHost.
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
  MpiProxy proxy_;  // used by the mpi engine only
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
  LinkThreads link_threads_{state_, sleepers_, peers_, table_, driver_};
};

}  // namespace multiring
