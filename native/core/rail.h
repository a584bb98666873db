// One connection of a tcp link: frames out of a queue, frames in, and whether anything comes through.
//
// A link of several rails keeps what it has sent until the peer's kernel has acknowledged it, so that it can be sent
// again over another rail. What a kernel has acknowledged its process can still read, whatever becomes of the rail; it
// may only come to read it after what was sent later over the other.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "goodput.h"
#include "handshake.h"
#include "link.h"
#include "payload.h"
#include "poller.h"

namespace multiring {

// What travels before a frame's payload. `number` counts the frames other than data that must come in order and once.
struct Packet {
  Frame frame;
  uint64_t number = 0;
};
static_assert(sizeof(Packet) == 72);

// Bytes that follow a frame: of payload, of a note or of a control message.
inline size_t payload_of(const Frame& frame) {
  const bool has_payload =
      frame.kind == FrameKind::data || frame.kind == FrameKind::round || frame.kind == FrameKind::control;
  return has_payload ? frame.length : 0;
}

// A frame on its way out.
struct Outgoing {
  Packet packet;
  const std::byte* payload = nullptr;
  Payload kept;                 // owns the payload; null: it lies in the memory that was offered
  OutStream* stream = nullptr;  // told when the payload is with the kernel
  size_t sent = 0;              // bytes, header included
  uint64_t end = 0;             // where it ended among all bytes of the rail
  bool is_data() const { return packet.frame.kind == FrameKind::data; }
  size_t size() const { return sizeof(Packet) + payload_of(packet.frame); }
};

// Where what follows a frame goes.
struct Place {
  std::byte* at = nullptr;
  Payload owned;        // null: user's memory, or not wanted
  bool wanted = false;  // false: read and dropped
};

class Rail;

class RailOwner {
 public:
  virtual ~RailOwner() = default;
  virtual void on_up(Rail& rail) = 0;
  virtual bool place(Rail& rail, const Frame& frame, Place& place) = 0;  // false: the rail was broken off
  virtual void on_packet(Rail& rail, const Packet& packet, Place place) = 0;
  virtual void on_writable(Rail& rail) = 0;
  virtual void on_broken(Rail& rail, const std::string& why) = 0;
};

class Rail {
 public:
  enum class State : uint8_t { waiting, calling, up, given_up, closed };

  // `probe_every`: what the kernel asks the other one for where nothing else goes over a connection.
  Rail(uint16_t index, int peer, bool keeps, Clock::duration probe_every, RailOwner& owner, Poller& poller)
      : index_(index), peer_(peer), keeps_(keeps), probe_every_(probe_every), owner_(owner), poller_(poller) {}
  ~Rail();
  Rail(const Rail&) = delete;
  Rail& operator=(const Rail&) = delete;

  // Connects to `host`:`port` (numeric) from the address `from` (empty: any). Fault::rendezvous if it cannot start.
  void call(const std::string& host, uint16_t port, const std::string& from, const Handshake::Self& self,
            Clock::time_point deadline);
  void adopt(Descriptor socket);  // an accepted, proven connection
  void give_up();                 // nothing more is queued here; what still arrives is read
  void close();
  void break_off(const std::string& why);  // close, and tell the owner
  void tend_call();  // breaks off a call that is past its deadline, and calls again where it was turned away
  void hang_up();  // no more frames from here; the peer sees the end

  uint16_t index() const { return index_; }
  State state() const { return state_; }
  bool is_up() const { return state_ == State::up; }
  bool is_open() const { return socket_.valid(); }
  bool is_calling() const { return call_ != nullptr; }
  bool holds_frames() const { return !queue_.empty() && !is_mute_; }
  uint64_t goodput() const { return is_up() ? goodput_of(socket_.get()) : 0; }  // bytes per second; 0: not known
  bool is_pending() const { return state_ == State::waiting || state_ == State::calling; }
  size_t queued_data() const { return queued_data_; }

  void push(Outgoing outgoing);         // behind everything
  void push_urgent(Outgoing outgoing);  // before payload that has not begun to travel
  bool flush();                         // hands to the kernel what it takes; true if anything
  void push_first(std::deque<Outgoing> frames);  // before all that has not begun to travel
  bool is_blocked() const { return wants_write_; }  // until the kernel has room again
  void unblock() { wants_write_ = false; }
  void watch_writes();  // asks to be told of room where something is left to write

  void receive_all();  // reads until nothing more is there

  void close_operation(const OperationKey& key, PayloadPool& pool);
  void abandon(const StreamKey& key, PayloadPool& pool);  // its payload that is coming in is dropped
  std::deque<Outgoing> take_unacknowledged();             // and what has not been sent

  struct Health {
    uint64_t acknowledged = 0;  // bytes, headers included
    double busy_s = 0;          // with something on the way
    bool waits = false;         // something on the way has not been answered
    double quiet_s = 0;         // since the peer's kernel answered anything
  };
  Health health() const;
  // Looks, and says for how long something has been on the way at every look with no answer in between. What is on the
  // way now may have been sent just now, after a rest, and a process or its machine that stood still has heard nothing:
  // of the time since the look before, at most `at_most` counts.
  struct Look {
    Clock::time_point when{};
    Health health;
    Clock::duration silence{};
  };
  Clock::duration silence(Look& last, Clock::duration at_most) const;
  bool holds_unacknowledged();

  bool has_left = false;  // the peer has said here that it leaves
  Look last_look;         // whether it is to be given up, and
  Look last_wire_look;    // whether it is silent like all others of its link

 private:
  static constexpr size_t kStagingBytes = 8 * 1024;
  static constexpr size_t kSpillBytes = 1024;

  // What to connect to, and until when. A rank that has many handshakes pending turns callers away.
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

  const uint16_t index_;
  const int peer_;
  const bool keeps_;
  const Clock::duration probe_every_;
  RailOwner& owner_;
  Poller& poller_;
  State state_ = State::waiting;
  std::unique_ptr<Call> call_;  // until it is through
  std::unique_ptr<Handshake> handshake_;
  Descriptor socket_;
  bool wants_write_ = false;
  bool is_mute_ = false;  // the kernel takes nothing more
  bool watches_write_ = false;

  std::deque<Outgoing> queue_;
  size_t queued_data_ = 0;
  std::deque<Outgoing> unacknowledged_;
  uint64_t written_ = 0;
  Health last_health_;  // when it was closed
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
