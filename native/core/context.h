// All state of one rank: its segment, its links, its operations in flight, and who drives them.
//
// One mutex guards the state. Whoever holds it may drive: the progress thread, which sleeps on the
// sockets, or a caller blocked in `wait`, which may spin for a bounded time and then sleeps on a
// futex in the control page. Peers ring one or the other, whichever sleeps. Nothing here is global,
// so that tests can run ranks as threads.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "digest.h"
#include "mpi_proxy.h"
#include "mpi_link.h"
#include "control_messages.h"
#include "operation.h"
#include "poller.h"
#include "shm_link.h"
#include "tcp_link.h"

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

// Where a rank can be met.
struct RailAddress {
  std::string host;
  uint16_t port = 0;
};

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

// A row of a timeline as it is: Python reads an array of them (trace/part.py has the same fields).
struct Event {
  enum class Kind : uint32_t { operation, wait, rail, reduce };
  Kind kind;
  uint32_t name;     // rail: which one was given up
  OperationKey key;  // rail: sequence = the peer
  uint64_t bytes;
  int64_t start_ns;   // steady clock
  int64_t agreed_ns;  // operation: when every rank had arrived; 0: never
  int64_t end_ns;
  // Of timelines only.
  uint64_t digest = 0;   // operation: the first bytes of its descriptor's
  int64_t busy_ns = 0;   // reduce: how much of its time was work
  uint32_t thread = 0;   // wait: whose, as the kernel counts threads
  FaultKind fault = FaultKind::none;  // operation
  uint8_t unused[3] = {};
};
static_assert(sizeof(Event) == 80 && std::is_trivially_copyable_v<Event>);

// What a rank says when it hands over its segment; `proof` shows that it knows the job's secret.
struct Greeting {
  int32_t rank = -1;
  uint32_t keep = 0;  // the connection stays, so that its end tells of the other's death
  Sha256 proof{};
  uint64_t witness_address = 0;  // a word of the rank's own memory, to try whether it can be read
  uint64_t witness = 0;
};

int64_t nanoseconds(Clock::time_point at);  // 0: the time point that stands for never
Clock::duration as_duration(double seconds);

class Context final : public LinkEvents, public Host {
 public:
  explicit Context(ContextConfig config);
  ~Context() override;

  // Names and addresses to tell the other ranks. Every call of `listen` makes one more rail.
  const std::string& handover_name() const { return handover_name_; }
  uint16_t listen(const std::string& host, uint16_t first_port, uint16_t last_port);

  // Maps every rank of this host and connects to `neighbours`. `local_ranks` lists this host's ranks, own one
  // included, the same on all of them. False: `interrupted` said to stop. Raises FaultKind::rendezvous.
  bool connect(const std::vector<PeerAddress>& peers, const std::vector<int>& local_ranks,
               const std::vector<int>& neighbours, double timeout_s, const std::function<bool()>& interrupted);

  // `caller_waits`: `wait` follows at once on this thread, so nobody else need be woken.
  std::shared_ptr<Operation> post(OperationSpec spec, bool caller_waits);
  // The blocking call again that `model` describes, on `data`, under the group's next sequence number: where all ranks
  // come within a few microseconds it is done when this returns. Else the operation, for `wait`; neither: nothing was
  // begun, because somebody is at work here or the operation cannot meet.
  struct Attempt {
    bool is_done = false;
    std::shared_ptr<Operation> operation;
  };
  Attempt meet(const OperationSpec& model, uint64_t group, std::atomic<uint64_t>& sequence, uint64_t steps, std::byte* data);
  enum class Waited : uint8_t { ended, timed_out, interrupted };
  Waited wait(const std::shared_ptr<Operation>& operation, double timeout_s);
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
  std::shared_ptr<Segment> own_segment() const { return segment_; }

  size_t unexpected_frames();  // kept for operations that this rank has yet to post

  // True once nothing is in flight and every frame has been handed on; false after `timeout_s`.
  bool settled(double timeout_s);

  // Opens the connections with these ranks that are not there yet; the others do the same.
  void link_with(const std::vector<int>& ranks);
  // Sends a short message to a rank, outside any operation. False: it is gone, or of another host, lower and not linked
  // with. FaultKind::state: it does not take what was sent to it.
  bool notify(int rank, uint64_t group, uint64_t tag, std::span<const std::byte> payload);
  // What has come, and what is new here, in order; empty after `timeout_s`, nothing at all once the context is closed.
  // For one thread.
  std::optional<std::vector<ControlMessage>> take_control_messages(double timeout_s);
  void wake_control();  // has take_control messages return

  // For the thread that calls MPI: work for it (see MpiProxy), what came of it, and peers MPI cannot reach any more.
  MpiProxy::Work collect(std::chrono::nanoseconds pause) { return proxy_.collect(pause); }
  void carried(const std::vector<uint64_t>& numbers);
  void cannot_reach(int peer, const std::string& why);

  // How long a blocked caller spins before it sleeps; 0, as at the start: not at all.
  void allow_spin(double seconds);

  // Lets operations in flight end for at most `grace_s`, and stops. `announce`: the other ranks are told that this one
  // left; without it they take its end for a death. Idempotent.
  void close(double grace_s, bool announce);

  // Host
  Link& link(int peer) override;
  Segment& segment() override { return *segment_; }
  uint64_t& staged_bytes() override { return staged_bytes_; }
  int rank() const override { return config_.rank; }
  bool logs_moves() const override { return config_.log_moves; }
  bool lowers() const override { return config_.lower; }
  bool times_work() const override { return keeps_timeline_; }
  bool shares_memory(int peer) const override { return local_rank(peer) && !losses_.contains(peer); }
  // LinkEvents
  void on_frame(int peer, const Frame& frame, std::span<const std::byte> payload) override;
  bool expects(const OperationKey& key) const override {
    const auto found = running_.find(key);
    return found != running_.end() && !found->second->has_failed();
  }
  void on_loss(int peer, LossKind kind, const std::string& why) override;
  void on_stuck(const OperationKey& key, const std::string& why) override { stuck_.try_emplace(key, why); }

 private:
  using Lock = std::unique_lock<std::mutex>;

  void progress_loop();
  void dispatch(const Poller::Ready& ready);
  // Does what belongs to no operation, on whichever thread; what goes wrong there ends this rank's part in the job, and
  // neither the process nor the thread.
  template <typename Work>
  void guarded(Work work) {
    try {
      work();
    } catch (const std::exception& error) {  // no memory to map a peer's segment, no watch left for a socket
      break_down(error.what());
    }
  }
  void break_down(const std::string& why);
  bool drive();
  bool drive_all();
  bool fail_stuck();
  bool receive_local();
  void end_of(const std::shared_ptr<Operation>& operation);
  void end_if_over(const std::shared_ptr<Operation>& operation);
  // What some member could not finish an operation for; `quiet_s` where that one is silent.
  struct FailureCause {
    int rank;
    LossKind kind;
    int64_t quiet_s;
  };
  bool makes_sense(const Frame& frame) const;
  static FailureCause cause_of(const Frame& frame);
  void fail_later(const OperationKey& key, const FailureCause& cause);
  bool settle_losses(size_t count);
  bool settle(const std::shared_ptr<Operation>& operation);
  void note_loss(int lost, LossKind kind, const std::string& why);
  std::string place_of(int rank) const;
  void on_exclusion(int peer);
  void tell_everyone(const Frame& frame);
  void tell_members(const Operation& operation, int lost, LossKind kind, int64_t quiet_s = 0);
  void fail_for(Operation& operation, int lost, const Loss& loss);
  void stall(const std::shared_ptr<Operation>& operation, const FailureCause& cause);
  void fail_alone(Operation& operation, const std::string& why);
  void tick();
  bool may_meet(const OperationSpec& spec, OperationKey key) const;
  void begin(const std::shared_ptr<Operation>& operation);
  bool is_quick(const Operation& operation) const;
  bool drive_here(const std::shared_ptr<Operation>& operation);
  bool drive_one(const std::shared_ptr<Operation>& operation);
  void wake_waiting(const SharedSlots& slots);
  bool has_news() const;
  bool may_sleep(uint32_t sleeper);
  void wake_self();
  void record(const Event& event);
  void on_control(int peer, const Frame& frame, std::span<const std::byte> payload);
  void tell_here(ControlMessage own);
  void wake_driver();
  void keep(const Event& event);
  bool congested() const;
  // What a silent rank has not received is not waited for.
  bool local_rank(int rank) const;
  void believe_gossip(Clock::time_point now);
  bool hands_on() const;  // frames wait for ranks that have yet to connect
  bool is_settled() const {
    return running_.empty() && !congested() && (proxy_.is_quiet() || !stalled_groups_.empty());
  }

  // Hand-over of segments between ranks of one host.
  void open_handover();
  void on_handover_ready();
  void on_pending_handover(int fd);
  // False if it was interrupted.
  bool map_from(const PeerAddress& peer, Clock::time_point deadline, const std::function<bool()>& interrupted);
  Sha256 proof_of(int from, int to) const;
  Doorbell::Word doorbell_word_of(int rank) const;  // what a rank is to be rung with
  Greeting greeting_to(int peer) const;
  void adopt_memory(const Descriptor& memory, const Greeting& theirs, int pid);
  void watch(int peer, Descriptor socket);
  void on_watch_ready(int peer);

  // Connections between hosts.
  TcpLink& tcp_link(int peer);
  TcpLink& make_link(int peer);
  Handshake::Self self_on(uint16_t rail) const;
  void on_caller(const Descriptor& listener);
  void watch_rails();
  bool rails_need_watching() const;
  void watch_wires();
  bool waits_for_time() const;  // something here has a deadline, whatever else happens
  void rest_listeners(Clock::duration pause);
  void listen_again();
  bool make_room_for_caller();
  void on_handshake(int fd);
  void drop_pending(int fd);
  void expire_pending();
  void tend_calls();
  bool is_calling() const;

  const Origin origin_;
  const ContextConfig config_;
  std::string handover_name_;
  uint64_t witness_ = 0;  // random; peers read it to learn whether they can read this process
  std::shared_ptr<Segment> segment_;
  std::unique_ptr<Doorbell> doorbell_;
  const std::shared_ptr<PayloadPool> pool_ = std::make_shared<PayloadPool>();
  const std::shared_ptr<ShmBuffers> shm_buffers_ = std::make_shared<ShmBuffers>();
  Poller poller_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool caller_drives_ = false;
  Clock::time_point last_caller_{};
  Clock::time_point last_quick_{};
  bool naps_ = false;  // whether the progress thread sleeps for a millisecond at most
  bool closing_ = false;
  double spin_s_ = 0;
  bool stopped_ = false;
  std::string broken_;  // what went wrong on the progress thread; nothing can be relied on after it
  std::unique_ptr<std::thread> progress_;

  std::map<int, PeerAddress> addresses_;
  std::vector<int> local_ranks_;
  uint32_t local_index_ = 0;
  std::set<int> neighbours_;
  MpiProxy proxy_;                         // empty but for the mpi engine
  std::vector<std::unique_ptr<Link>> links_;  // by rank; null: none yet
  std::vector<ShmLink*> local_links_;         // by local index
  std::map<int, TcpLink*> tcp_links_;  // also those inside mpi_links_
  std::map<int, MpiLink*> mpi_links_;
  Descriptor handover_socket_;
  struct Listener {
    std::string host;
    Descriptor socket;
  };
  std::vector<Listener> listeners_;  // by rail
  std::optional<Clock::time_point> listens_again_;  // who comes until then stays in the kernel's queue
  std::map<int, Descriptor> pending_handovers_;  // accepted hand-over sockets that have said nothing yet
  std::map<int, Descriptor> watches_;   // rank -> socket whose end tells of its death
  std::map<int, std::unique_ptr<Handshake>> pending_handshakes_;

  std::map<OperationKey, std::shared_ptr<Operation>> running_;
  uint64_t staged_bytes_ = 0;
  struct UnexpectedFrame {
    int peer;
    Frame frame;
    std::vector<std::byte> payload;
  };
  std::map<OperationKey, std::vector<UnexpectedFrame>> unexpected_;  // frames for operations not posted yet
  // Operations that ended here lately: what comes of them now, from ranks where they failed, waits for nothing.
  std::array<OperationKey, 256> over_;
  OperationKey& over(const OperationKey& key) { return over_[(key.group * 31 + key.sequence) % over_.size()]; }
  std::map<int, Loss> losses_;
  struct Gossip {
    Clock::time_point believed_at;
    std::string why;
  };
  std::map<int, Gossip> gossip_;
  struct NewLoss {
    int rank;
    Loss loss;
    Clock::time_point found;
    bool is_passed_on = true;
  };
  std::vector<NewLoss> new_losses_;  // found while links or operations are at work, in order
  std::vector<int> loss_order_;                   // lost ranks as they were learned of
  struct Stall {
    uint64_t sequence;
    FailureCause cause;
  };
  std::map<OperationKey, std::string> stuck_;  // what this rank cannot go on with, and why
  std::map<OperationKey, FailureCause> causes_;  // what some member could not finish, and for whom
  std::map<uint64_t, Stall> stalls_;     // by group: the first operation that a member has stalled in
  std::map<uint64_t, std::string> stalled_groups_;           // which ranks took part in what is not known there any more
  std::vector<RailLoss> rail_losses_;
  ControlMessages control_;
  std::condition_variable control_came_;
  bool is_woken_ = false;
  bool connected_ = false;
  Clock::time_point next_rail_watch_{};
  Clock::time_point next_wire_watch_{};
  uint64_t ended_ = 0;   // operations, ever
  uint64_t told_of_ = 0;  // of those: when a sleeping caller was last told
  bool unsettled_ = false;                        // a loss is known that operations were not checked for
  Clock::time_point next_tick_{};
  std::deque<Event> events_;  // the newest
  uint64_t dropped_events_ = 0;
  bool keeps_timeline_ = false;
  std::vector<Event> timeline_;
  uint64_t dropped_from_timeline_ = 0;
};

}  // namespace multiring
