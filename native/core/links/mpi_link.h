// The mpi engine: frames and notes use a TCP connection as in the tcp engine, and streams travel as MPI messages.
//
// The connection also reveals the loss of a peer, which MPI itself does not report. A frame announces each MPI message,
// so the receiver posts exactly the receives that it needs. There are no wildcard receives and no unexpected messages,
// and no thread polls while no message is announced. Credit bounds a stream as in the tcp engine.
#pragma once

#include <deque>
#include <map>
#include <set>
#include <span>
#include <string>

#include "link.h"
#include "memory/poller.h"
#include "mpi_proxy.h"
#include "tcp_link.h"

namespace multiring {

class MpiLink final : public Link, private LinkEvents {
 public:
  MpiLink(int peer, LinkEvents& events, Poller& poller, TcpLink::Rails rails, MpiProxy& proxy)
      : Link(peer, events), proxy_(proxy), connection_(peer, *this, poller, rails) {}
  ~MpiLink() override;

  TcpLink& connection() { return connection_; }
  void arrived(uint64_t number, MpiProxy::Memory memory);  // MPI has received bounce buffer `number`
  void break_off(const std::string& why);                  // reports the peer as lost because of an MPI error
  uint64_t goodput() const;  // bytes per second that arrived at the peer recently; 0 if unknown

  void send(const Frame& frame) override { connection_.send(frame); }
  void send_note(const Frame& frame, std::span<const std::byte> payload) override {
    connection_.send_note(frame, payload);
  }
  void consume(const StreamKey& key, InStream& stream, size_t size) override;
  bool pump() override;
  void close(const OperationKey& key) override;

 private:
  static constexpr uint64_t kWindow = 2 << 20;  // most bytes of a stream in transit
  static constexpr uint32_t kTags = 32768;      // every MPI supports at least this many tags

  struct Expected {
    uint64_t number;
    size_t size;
    MpiProxy::Memory memory;  // null until the message has arrived
  };

  OutStream fresh_out() const override {
    OutStream stream;
    stream.credit = kWindow;
    return stream;
  }
  // Implementation of LinkEvents, for the TCP connection.
  void on_frame(int peer, const Frame& frame, std::span<const std::byte> payload) override;
  bool expects(const OperationKey&) const override { return false; }  // payload never arrives over the connection
  void on_loss(int peer, LossKind kind, const std::string& why) override;
  void on_stuck(const OperationKey& key, const std::string& why) override { events_.on_stuck(key, why); }

  void dispatch(const StreamKey& key, OutStream& stream);
  void expect(const Frame& frame);
  void note_landed(uint64_t bounces);
  void give_up();

  MpiProxy& proxy_;
  TcpLink connection_;
  bool is_gone_ = false;
  uint32_t next_tag_ = 0;
  std::deque<size_t> aloft_;        // sizes of sent bounce buffers whose arrival is not confirmed
  Clock::time_point aloft_from_{};  // start of the current goodput sample
  uint64_t aloft_landed_ = 0;       // bytes confirmed in the current goodput sample
  double goodput_bytes_ = 0;        // bytes of recent samples
  double goodput_s_ = 0;            // seconds of recent samples
  std::map<StreamKey, std::deque<Expected>> expected_;  // announced messages in stream order; they arrive in any order
  std::map<uint64_t, StreamKey> key_of_;                // bounce buffer number -> its stream, until it arrives
  std::set<uint64_t> unwanted_;  // bounce buffers in transit whose operations have ended
  uint64_t unsaid_ = 0;          // arrived bounce buffers that are not confirmed to the peer
};

}  // namespace multiring
