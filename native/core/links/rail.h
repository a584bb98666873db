// One connection of a tcp link: it queues and sends frames, receives frames, and reports its health.
//
// A link with several rails keeps sent frames until the peer's kernel has acknowledged them, so that another rail can
// send them again. The peer's process can still read acknowledged bytes after the rail is lost. But it may read later
// frames, sent over another rail, before these bytes.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "goodput.h"
#include "handshake.h"
#include "link.h"
#include "link_thread.h"
#include "memory/payload.h"
#include "memory/poller.h"
#include "sealed_stream.h"

namespace multiring {

// The header that precedes a frame's payload. `number` numbers the non-data frames that must arrive in order and once;
// it is 0 for all other frames.
struct Packet {
  Frame frame;
  uint64_t number = 0;
};
static_assert(sizeof(Packet) == 72);

// Returns the number of bytes that follow a frame: the payload of data, of a note or of a control message.
inline size_t payload_of(const Frame& frame) {
  const bool has_payload =
      frame.kind == FrameKind::data || frame.kind == FrameKind::round || frame.kind == FrameKind::control;
  return has_payload ? frame.length : 0;
}

// A frame that is queued or being sent.
struct Outgoing {
  Packet packet;
  const std::byte* payload = nullptr;
  Payload kept;                 // owns the payload; null if the payload lies in the offered memory
  OutStream* stream = nullptr;  // updated when the kernel has accepted the payload
  size_t sent = 0;              // bytes sent so far, including the header
  uint64_t end = 0;             // position of the frame's end among all bytes that the rail has sent
  bool in_flight = false;       // a thread writes it now, without the mutex
  bool has_begun() const { return sent > 0 || in_flight; }
  bool is_data() const { return packet.frame.kind == FrameKind::data; }
  size_t size() const { return sizeof(Packet) + payload_of(packet.frame); }
};

// The memory that receives the payload of an incoming frame.
struct Place {
  std::byte* at = nullptr;
  Payload owned;        // owns the memory; null if it is the user's memory
  bool wanted = false;  // false: the payload is read and discarded
};

class Rail;

// Callbacks from a rail to its link.
class RailOwner {
 public:
  virtual ~RailOwner() = default;
  virtual void on_up(Rail& rail) = 0;
  // Chooses the memory for the payload of `frame`. Returns false if it broke off the rail.
  virtual bool place(Rail& rail, const Frame& frame, Place& place) = 0;
  virtual void on_packet(Rail& rail, const Packet& packet, Place place) = 0;
  virtual void on_writable(Rail& rail) = 0;
  virtual void on_broken(Rail& rail, const std::string& why) = 0;
  // A sealed connection ended, or carried bytes that the peer did not send. An attacker may have acknowledged bytes
  // that never arrived, so no other rail can replace this one.
  virtual void on_cut(Rail& rail, const std::string& why) = 0;
};

enum class RailState : uint8_t { waiting, calling, up, given_up, closed };

class Rail {
 public:
  // `keeps`: keep sent frames until they are acknowledged. `probe_every`: the interval at which the kernel probes the
  // peer's kernel over an idle connection.
  // `thread` moves the rail's bytes; null if the thread that calls does.
  Rail(uint16_t index, int peer, bool keeps, Clock::duration probe_every, RailOwner& owner, Poller& poller,
       LinkThread* thread = nullptr)
      : index_(index), peer_(peer), keeps_(keeps), probe_every_(probe_every), owner_(owner), poller_(poller),
        thread_(thread) {}
  ~Rail();
  Rail(const Rail&) = delete;
  Rail& operator=(const Rail&) = delete;

  // Connects to `host`:`port` (numeric) from the address `from` (empty: any). Throws Fault::rendezvous if the
  // connection cannot be started.
  void call(const std::string& host, uint16_t port, const std::string& from, const Handshake::Self& self,
            Clock::time_point deadline);
  // Uses an accepted, authenticated connection. `stream`: seals its bytes; null if the job does not seal.
  void adopt(Descriptor socket, std::unique_ptr<SealedStream> stream = nullptr);
  void give_up();                 // stops using the rail for sending; frames that still arrive are received
  void close();                   // closes the rail without notifying the owner
  void break_off(const std::string& why);  // closes the rail and notifies the owner
  void end(const std::string& why);        // the same, for a connection that ended or broke by itself
  void tend_call();  // breaks off a call past its deadline, and repeats a call that the peer turned away
  void hang_up();  // sends no more frames; the peer reads the end of the connection

  uint16_t index() const { return index_; }
  RailState state() const { return state_; }
  bool is_up() const { return state_ == RailState::up; }
  bool is_open() const { return socket_.valid(); }
  bool is_calling() const { return call_ != nullptr; }
  bool holds_frames() const { return socket_.valid() && (!queue_.empty() || pending() > 0) && !is_mute_; }
  bool is_sealed() const { return stream_ != nullptr; }
  size_t in_transit() const;  // bytes that the kernel has accepted and the peer's kernel has not acknowledged
  uint64_t goodput() const { return is_up() ? goodput_of(socket_.get()) : 0; }  // bytes per second; 0 if unknown
  bool is_pending() const { return state_ == RailState::waiting || state_ == RailState::calling; }
  size_t queued_data() const { return queued_data_; }

  void push(Outgoing outgoing);         // queues a frame behind all others
  void push_urgent(Outgoing outgoing);  // queues a frame before all data frames of which nothing has been sent
  // Sends as much as the kernel accepts; true if anything was sent. `in_thread`: the rail's own thread calls. Then it
  // writes once and releases the mutex meanwhile.
  bool flush(bool in_thread = false);
  bool leaves_to_thread();  // true if the rail's thread sends what is queued; wakes it
  void push_first(std::deque<Outgoing> frames);  // queues frames before all frames of which nothing has been sent
  bool is_blocked() const { return wants_write_; }  // true until the kernel has room again
  void unblock() { wants_write_ = false; }
  void watch_writes();  // starts or stops polling for room, depending on whether the rail is blocked

  void receive_all();  // reads until no more bytes are available

  // Drops the operation's frames. A frame that is partly sent or received continues in memory of `pool`.
  void close_operation(const OperationKey& key, PayloadPool& pool);
  void abandon(const StreamKey& key, PayloadPool& pool);  // discards the stream's payload that is being received
  std::deque<Outgoing> take_unacknowledged();             // returns the unacknowledged and the unsent frames

  struct Health {
    uint64_t acknowledged = 0;  // acknowledged bytes, including headers
    double busy_s = 0;          // seconds with bytes in transit
    bool waits = false;         // bytes or probes in transit are not acknowledged
    double quiet_s = 0;         // seconds since the last acknowledgement
  };
  Health health() const;
  // Checks the rail and returns for how long it has been silent: bytes were in transit at every check, and no
  // acknowledgement arrived between the checks. Of the time since the previous check, at most `at_most` counts. The
  // bytes may have been sent only just now, and this process or its machine may have been suspended.
  struct Look {
    Clock::time_point when{};
    Health health;
    Clock::duration silence{};
  };
  Clock::duration silence(Look& last, Clock::duration at_most) const;
  bool holds_unacknowledged();

  bool has_left = false;  // the peer has announced over this rail that it leaves
  Look last_look;         // the last check of this rail alone
  Look last_wire_look;    // the last check of all rails of the link together

 private:
  static constexpr size_t kStagingBytes = 8 * 1024;
  static constexpr size_t kSpillBytes = 1024;
  // So few bytes are sent by any thread at once, because waking another thread would take longer.
  static constexpr size_t kFewBytes = 32 * 1024;
  static constexpr int kReads = 32;         // most reads before other connections get their turn
  static constexpr int kThreadReads = 8;    // the same for a rail with a thread of its own, which sends as well

  // An attempt to connect. A rank with many pending handshakes turns callers away; then the attempt is repeated.
  struct Call {
    std::string host;
    uint16_t port;
    std::string from;
    Handshake::Self self;
    Clock::time_point deadline;
    Clock::time_point again_at{};
    Clock::duration pause = std::chrono::milliseconds(10);  // doubles
  };

  void on_ready(uint32_t events);
  void on_handshake();
  void dial();
  void watch_socket();
  void ask_when_idle();
  bool receive(int turns);
  bool receive_some();
  bool take_staged();
  void deliver();
  void drop_acknowledged();
  // Returns the sealed bytes that the kernel has not accepted.
  size_t pending() const { return stream_ && !is_writing_ ? stream_->pending() : 0; }
  size_t queued_bytes() const;
  Poller& watcher() { return thread_ != nullptr ? thread_->poller : poller_; }  // watches the socket
  size_t gather(std::span<iovec> parts, bool in_thread);
  void write_aside(std::span<iovec> parts);
  bool account_for_write();
  void settle_write();
  void settle_read();
  ssize_t read(std::span<const iovec> room);
  ssize_t write(std::span<iovec> parts);

  const uint16_t index_;
  const int peer_;
  const bool keeps_;
  const Clock::duration probe_every_;
  RailOwner& owner_;
  Poller& poller_;
  LinkThread* const thread_;
  RailState state_ = RailState::waiting;
  std::unique_ptr<Call> call_;  // null once the rail is connected
  std::unique_ptr<Handshake> handshake_;
  Descriptor socket_;
  std::unique_ptr<SealedStream> stream_;  // null: bytes travel unsealed
  bool wants_write_ = false;
  bool is_mute_ = false;  // the kernel rejects all further writes
  bool watches_write_ = false;

  // A system call that the rail's thread makes without RankState::mutex. The thread holds `call` during the call, so a
  // thread that holds RankState::mutex and then locks `call` waits until the call has ended. It never blocks.
  std::mutex write_call_;
  std::mutex read_call_;
  bool is_writing_ = false;
  bool is_reading_ = false;
  struct Write {
    size_t offered = 0;
    ssize_t wrote = 0;
    int error = 0;
  };
  Write write_;  // the last write

  std::list<Outgoing> queue_;  // a list, because a thread may read an element while others are inserted
  size_t queued_data_ = 0;
  std::deque<Outgoing> unacknowledged_;
  uint64_t written_ = 0;  // bytes on the wire, sealed bytes that wait for the kernel included
  Health last_health_;  // the health when the rail was closed
  std::array<std::byte, kStagingBytes> staging_{};
  bool receives_ = false;
  size_t staged_from_ = 0;
  size_t staged_to_ = 0;
  Packet incoming_{};
  size_t header_got_ = 0;
  Place place_;
  size_t payload_got_ = 0;
};

}  // namespace multiring
