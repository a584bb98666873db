// The mpi engine: frames and notes over one connection, as the tcp engine's, and streams as MPI messages.
//
// What is said before a payload, and that a peer is gone, comes over the connection: MPI itself has no word for a
// death. A frame announces each message, so that the receiver waits for exactly what is on its way: no wildcards,
// nothing unexpected, nobody polls while nothing is announced. Credit bounds a stream as in the tcp engine.
#pragma once

#include <deque>
#include <map>
#include <set>
#include <span>
#include <string>

#include "link.h"
#include "mpi_proxy.h"
#include "poller.h"
#include "tcp_link.h"

namespace multiring {

class MpiLink final : public Link, private LinkEvents {
 public:
  MpiLink(int peer, LinkEvents& events, Poller& poller, TcpLink::Rails rails, MpiProxy& proxy)
      : Link(peer, events), proxy_(proxy), connection_(peer, *this, poller, rails) {}
  ~MpiLink() override;

  TcpLink& connection() { return connection_; }
  void arrived(uint64_t number, MpiProxy::Memory memory);  // a bounce buffer for this rank
  void break_off(const std::string& why);                  // what MPI says of the peer
  uint64_t goodput() const;                                // bytes per second that landed there lately; 0: not known

  void send(const Frame& frame) override { connection_.send(frame); }
  void send_note(const Frame& frame, std::span<const std::byte> payload) override {
    connection_.send_note(frame, payload);
  }
  void consume(const StreamKey& key, InStream& stream, size_t size) override;
  bool pump() override;
  void close(const OperationKey& key) override;

 private:
  static constexpr uint64_t kWindow = 2 << 20;  // bytes of a stream that may be on the way
  static constexpr uint32_t kTags = 32768;      // MPI grants at least these

  struct Expected {
    uint64_t number;
    size_t size;
    MpiProxy::Memory memory;  // null: not here yet
  };

  OutStream fresh_out() const override {
    OutStream stream;
    stream.credit = kWindow;
    return stream;
  }
  // LinkEvents, of the connection
  void on_frame(int peer, const Frame& frame, std::span<const std::byte> payload) override;
  bool expects(const OperationKey&) const override { return false; }  // payload comes by MPI only
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
  std::deque<size_t> aloft_;  // bytes of the bounce buffers sent that are not known to have landed
  Clock::time_point aloft_from_{};                     // since then some have been, and
  uint64_t aloft_landed_ = 0;                          // so many bytes of them landed
  double goodput_bytes_ = 0;                           // of late, and the seconds they took
  double goodput_s_ = 0;
  std::map<StreamKey, std::deque<Expected>> expected_;  // in the order of the stream; arrivals are not
  std::map<uint64_t, StreamKey> key_of_;                // bounce buffer number -> its stream, until it arrives
  std::set<uint64_t> unwanted_;                         // bounce buffers on the way for operations that are over
  uint64_t unsaid_ = 0;                                 // bounce buffers that landed since the peer was told
};

}  // namespace multiring
