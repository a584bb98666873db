// The tcp engine: frames and payload over one non-blocking connection, bounded by credit.
//
// A stream may have kWindow bytes on the way; consuming gives credit back. Payload goes from the
// offered memory straight to the socket, and arrives in pieces the operation reads in place.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "goodput.h"
#include "handshake.h"
#include "link.h"
#include "poller.h"

namespace multiring {

class TcpLink final : public Link {
 public:
  TcpLink(int peer, LinkEvents& events, Poller& poller) : Link(peer, events), poller_(poller) {}
  ~TcpLink() override;

  // Connects to `host`:`port` (numeric); frames sent meanwhile wait. Fault::rendezvous if it cannot start.
  void call(const std::string& host, uint16_t port, const Handshake::Self& self, Clock::time_point deadline);
  void adopt(Descriptor socket);  // an accepted, proven connection
  bool established() const { return socket_.valid(); }
  bool calling() const { return handshake_ != nullptr; }
  uint64_t goodput() const { return socket_.valid() ? goodput_of(socket_.get()) : 0; }
  bool idle() const { return queue_.empty(); }  // everything was handed to the kernel
  void expire();                                // gives up a call that is past its deadline
  void hang_up();                               // no more frames from here; the peer sees the end

  void send(const Frame& frame) override;
  void send_note(const Frame& frame, std::span<const std::byte> payload) override;
  void consume(const StreamKey& key, InStream& stream, size_t size) override;
  bool pump() override;
  void close(const OperationKey& key) override;

 private:
  static constexpr size_t kFrameBytes = 128 * 1024;  // payload of one data frame
  static constexpr uint64_t kWindow = 2 << 20;
  static constexpr size_t kQueuedFrames = 4;  // data frames at once, so that control frames need not wait long

  struct Chunk {
    Frame frame;
    const std::byte* payload = nullptr;
    size_t size = 0;  // header and payload
    size_t sent = 0;
    OutStream* stream = nullptr;
    std::unique_ptr<std::byte[]> kept;  // payload of a note, or of a closed operation that is half sent
  };

  OutStream fresh_out() const override {
    OutStream stream;
    stream.credit = kWindow;
    return stream;
  }
  void on_ready(uint32_t events);
  void on_handshake();
  void watch_socket();
  bool flush();
  bool refill();
  bool receive();
  bool accept_frame();
  void deliver();
  void break_off(const std::string& why);

  Poller& poller_;
  std::unique_ptr<Handshake> handshake_;
  Descriptor socket_;
  bool broken_ = false;
  bool wants_write_ = false;
  std::deque<Chunk> queue_;
  size_t queued_data_ = 0;

  Frame incoming_{};
  size_t header_got_ = 0;
  std::unique_ptr<std::byte[]> payload_;
  size_t payload_got_ = 0;
};

}  // namespace multiring
