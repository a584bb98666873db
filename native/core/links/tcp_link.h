// The tcp engine: frames and payload travel over one non-blocking connection per rail, bounded by credit.
//
// A stream may have kWindow unconsumed bytes in transit; consuming returns credit to the sender. One rail carries all
// bytes of a stream, in order. Frames other than data use the first working rail. With one rail, payload is sent
// directly from the offered memory. With several rails, the link copies payload and keeps the copy until the peer's
// kernel has acknowledged it. If a rail stops answering, the link abandons it and sends the unacknowledged frames over
// another rail. If an operation already waits to copy the payload, the link receives it directly at its final place.
//
// If one thread cannot fill the wire, a rail may have several connections, each with a thread (LinkThread). Then the
// link deals a stream's frames to whichever connection has room, and the receiver puts them in order by their offsets. The
// connections share one wire, so the loss of any of them is the loss of the link; nothing is copied or sent again.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "link_thread.h"
#include "rail.h"

namespace multiring {

struct RailStatus {
  int peer;
  uint16_t rail;
  bool is_up;
  uint64_t acknowledged;  // bytes that the peer's kernel has received
  double busy_s;          // seconds in which the rail had bytes to send and neither side's buffer limited it
};

// A rail that is no longer used.
struct RailLoss {
  int peer;
  uint16_t rail;
  std::string why;
  Clock::time_point when;
};

class TcpLink final : public Link, public RailOwner {
 public:
  struct Rails {
    uint16_t count;
    Clock::duration timeout;  // a rail that is silent for so long while another works is abandoned
    Clock::duration wire_timeout;  // if all rails are silent, the peer's host is reported as cut off within this time
    std::shared_ptr<PayloadPool> pool;  // shared by all links of the rank
    // The threads of a rail with several connections; empty if each rail has one. Then `count` must be 1.
    std::span<const std::unique_ptr<LinkThread>> threads = {};
  };
  TcpLink(int peer, LinkEvents& events, Poller& poller, Rails rails);

  // Connects a rail to `host`:`port` (numeric) from the address `from` (empty: any). Frames wait until the link is
  // connected. Throws Fault::rendezvous if the connection cannot be started.
  void call(uint16_t rail, const std::string& host, uint16_t port, const std::string& from, const Handshake::Self& self,
            Clock::time_point deadline);
  // Uses an accepted, authenticated connection for the rail. `stream`: see Rail::adopt.
  void adopt(uint16_t rail, Descriptor socket, std::unique_ptr<SealedStream> stream = nullptr);
  bool awaits(uint16_t rail) const { return rails_[rail]->state() == RailState::waiting; }
  bool established() const;  // true if no rail is still connecting and at least one is up
  bool holds_frames() const;  // true if frames wait that the kernel has not accepted yet
  bool is_sending() const;    // the same, without frames that wait for the connection
  size_t in_transit() const;  // bytes that the kernel has accepted and the peer's kernel has not acknowledged
  bool is_open() const;      // true if the peer may still send something
  std::vector<uint16_t> rails_not_up() const;
  void tend_calls();         // breaks off calls past their deadline, and repeats calls that the peer turned away
  bool is_calling() const;   // true if `tend_calls` must be called regularly
  bool carry(uint16_t index);  // for thread `index`: sends on its connection; true if anything was sent
  void hang_up();            // sends no more frames; the peer reads the end of the connection

  void watch_rails();  // abandons rails that are silent while another rail works
  bool needs_watching() const;
  void watch_wire();  // breaks off the link if all rails are silent
  std::vector<RailLoss> take_losses();  // lost rails; delayed, because a peer that ends loses its rails one by one
  std::vector<RailStatus> rails() const;
  uint64_t goodput() const;  // bytes per second over all rails, as the kernel measured them; 0: not known

  void send(const Frame& frame) override;
  void send_note(const Frame& frame, std::span<const std::byte> payload) override;
  size_t copy(InStream& stream, std::byte* target, size_t most) override;
  void consume(const StreamKey& key, InStream& stream, size_t size) override;
  bool pump() override;
  void close(const OperationKey& key) override;

 private:
  static constexpr uint64_t kWindow = 2 << 20;
  static constexpr size_t kQueuedFrames = 2;  // most queued data frames that the kernel has not accepted
  static constexpr int kWritesATurn = 4;      // most writes of a thread before it reads again

  OutStream fresh_out() const override {
    OutStream stream;
    stream.credit = kWindow;
    return stream;
  }
  // Implementation of RailOwner.
  void on_up(Rail& rail) override;
  bool place(Rail& rail, const Frame& frame, Place& place) override;
  void on_packet(Rail& rail, const Packet& packet, Place place) override;
  void on_writable(Rail& rail) override;
  void on_broken(Rail& rail, const std::string& why) override;
  void on_cut(Rail&, const std::string& why) override { break_off(LossKind::died, why); }

  bool keeps() const { return !deals_ && rails_.size() > 1; }
  Rail* first_up() const;
  Rail& carrier_of(OutStream& stream);
  void begin_if_ready();
  void send_numbered(Outgoing outgoing);
  void send_everywhere(Outgoing outgoing);
  void on_control(Rail& rail, const Packet& packet, std::span<const std::byte> payload);
  void on_arrival(const Frame& frame, Place place);
  bool fits(const Frame& frame, const InStream& stream) const;
  bool pump(Rail& rail);
  bool refill(Rail& rail);
  Outgoing next_of(const StreamKey& key, OutStream& stream);
  bool catch_up(const Rail& rail);
  void lose(Rail& rail, const std::string& why);
  void break_off(LossKind kind, const std::string& why);

  const bool deals_;  // several connections share the frames of each stream
  const Clock::duration rail_timeout_;
  const Clock::duration wire_timeout_;
  const std::shared_ptr<PayloadPool> pool_;
  std::vector<std::unique_ptr<Rail>> rails_;
  bool begun_ = false;
  bool broken_ = false;
  Clock::time_point first_up_at_{};
  std::deque<Outgoing> held_;  // frames that wait for a rail
  uint64_t numbered_out_ = 0;
  uint64_t numbered_in_ = 0;
  std::vector<RailLoss> losses_;
};

}  // namespace multiring
