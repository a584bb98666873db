// The tcp engine: frames and payload over one non-blocking connection a rail, bounded by credit.
//
// A stream may have kWindow bytes on the way; consuming gives credit back. Each stream travels over one rail, in order;
// frames other than data over the first that lives. With one rail payload goes from the offered memory straight to the
// socket. With several it is copied aside on its way, and kept until the peer's kernel has it: a rail over which
// nothing comes back any more is given up, and what it had not delivered goes over another. Payload that an operation
// is waiting to copy is received where it belongs.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "rail.h"

namespace multiring {

struct RailStatus {
  int peer;
  uint16_t rail;
  bool is_up;
  uint64_t acknowledged;  // bytes that the peer's kernel has received
  double busy_s;          // in which there was something to carry, and room for it over there
};

// A rail that is used no more.
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
    Clock::duration timeout;  // one that is silent for so long while another works is given up
    Clock::duration wire_timeout;  // where all are, the peer's host is cut off: noticed by then
    std::shared_ptr<PayloadPool> pool;  // of all links of the rank
  };
  TcpLink(int peer, LinkEvents& events, Poller& poller, Rails rails);

  // Connects to `host`:`port` (numeric) from the address `from` (empty: any); frames sent meanwhile wait.
  // Fault::rendezvous if it cannot start.
  void call(uint16_t rail, const std::string& host, uint16_t port, const std::string& from, const Handshake::Self& self,
            Clock::time_point deadline);
  void adopt(uint16_t rail, Descriptor socket);  // an accepted, proven connection
  bool awaits(uint16_t rail) const { return rails_[rail]->state() == Rail::State::waiting; }
  bool established() const;  // every rail's fate is known, and one is up
  bool holds_frames() const;  // some were not yet handed to the kernel
  bool is_open() const;      // something may still come from the peer
  std::vector<uint16_t> rails_not_up() const;
  void tend_calls();         // gives up calls that are past their deadline, and repeats those that were turned away
  bool is_calling() const;   // somebody has to call `tend_calls`
  void hang_up();            // no more frames from here; the peer sees the end

  void watch_rails();  // gives up rails over which nothing comes back, while another works
  bool needs_watching() const;
  void watch_wire();  // breaks off where nothing comes back over any rail
  std::vector<RailLoss> take_losses();  // those old enough to be none of a peer's end
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
  static constexpr size_t kQueuedFrames = 2;  // data frames beyond what the kernel took

  OutStream fresh_out() const override {
    OutStream stream;
    stream.credit = kWindow;
    return stream;
  }
  // RailOwner
  void on_up(Rail& rail) override;
  bool place(Rail& rail, const Frame& frame, Place& place) override;
  void on_packet(Rail& rail, const Packet& packet, Place place) override;
  void on_writable(Rail& rail) override;
  void on_broken(Rail& rail, const std::string& why) override;

  bool keeps() const { return rails_.size() > 1; }
  Rail* first_up() const;
  Rail& carrier_of(OutStream& stream);
  void begin_if_ready();
  void send_numbered(Outgoing outgoing);
  void send_everywhere(Outgoing outgoing);
  void on_control(Rail& rail, const Packet& packet, std::span<const std::byte> payload);
  void on_arrival(const Frame& frame, Place place);
  bool pump(Rail& rail);
  bool refill(Rail& rail);
  Outgoing next_of(const StreamKey& key, OutStream& stream);
  bool catch_up(const Rail& rail);
  void lose(Rail& rail, const std::string& why);
  void break_off(LossKind kind, const std::string& why);

  const Clock::duration rail_timeout_;
  const Clock::duration wire_timeout_;
  const std::shared_ptr<PayloadPool> pool_;
  std::vector<std::unique_ptr<Rail>> rails_;
  bool begun_ = false;
  bool broken_ = false;
  Clock::time_point first_up_at_{};
  std::deque<Outgoing> held_;  // until there is a rail to go over
  uint64_t numbered_out_ = 0;
  uint64_t numbered_in_ = 0;
  std::vector<RailLoss> losses_;
};

}  // namespace multiring
