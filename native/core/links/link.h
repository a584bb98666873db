// The transport interface: a Link carries frames and byte streams between this rank and one peer.
//
// A stream is identified by (operation, channel) and delivers bytes in order; there is one in each direction. `offer`
// never blocks: the memory must stay readable until `out(key).drained()`. `in(key).pieces` are views of the bytes that
// have arrived. `consume` releases them, and only then can the sender send more. A rank sends data only after every
// rank of the operation has agreed. Therefore a receiver buffers frames, but never payload, for operations that it has
// not posted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <string>

#include "memory/frame.h"
#include "memory/payload.h"

namespace multiring {

struct StreamKey {
  OperationKey operation;
  uint16_t channel = 0;
  auto operator<=>(const StreamKey&) const = default;
};

// Bytes that were offered to a peer and are not sent yet.
struct OutStream {
  struct PendingWrite {
    const std::byte* data;
    size_t size;
  };
  std::deque<PendingWrite> pending;
  uint64_t offered = 0;  // bytes
  uint64_t taken = 0;    // bytes whose source memory is no longer needed
  uint64_t sent = 0;     // bytes given to the transport (tcp: bounded by credit)
  uint32_t staged = 0;   // shm: number of staging slots that the stream holds
  uint64_t credit = 0;   // tcp: bytes that the peer has room for, counted from the stream's start
  static constexpr uint16_t kNoCarrier = UINT16_MAX;
  uint16_t rail = 0;              // tcp: the rail requested by `offer`
  uint16_t carrier = kNoCarrier;  // tcp: the rail that carries the stream
  bool drained() const { return offered == taken; }
};

// Bytes that have arrived and are not consumed yet.
struct InStream {
  struct Piece {
    const std::byte* data;  // an address of this process, or of the peer's ordinary memory (kForeign)
    size_t size;
    size_t whole;   // size of the piece when it arrived
    uint32_t slot;  // shm: the sender's staging slot, kNoSlot or kForeign
    Payload owned;  // tcp: owns the bytes; null if they were received at their final place
  };
  std::deque<Piece> pieces;
  std::unique_ptr<std::byte[]> fetched;  // the first bytes of a foreign piece
  const std::byte* fetched_from = nullptr;
  size_t fetched_size = 0;
  uint64_t ungranted = 0;  // tcp: bytes consumed since this rank last granted credit
  uint64_t arrived = 0;    // tcp: bytes of completely received frames, up to the first gap
  std::map<uint64_t, Piece> ahead;  // tcp: pieces behind the gap, by their offset, as connections overtake each other
  // tcp: the final place of the stream's bytes [landing_from, landing_to); null if it is not known yet.
  std::byte* landing = nullptr;
  uint64_t landing_from = 0;
  uint64_t landing_to = 0;
};

inline constexpr size_t kNoteBytes = 64 * 1024;
inline constexpr uint16_t kNoteChannel = UINT16_MAX;  // channel of `taken` frames for notes; no stream uses it
inline constexpr uint32_t kNoSlot = UINT32_MAX;       // the bytes lie in the sender's segment
inline constexpr uint32_t kForeign = UINT32_MAX - 1;  // the bytes lie in the sender's ordinary memory

// Callbacks from a link to its rank.
class LinkEvents {
 public:
  virtual ~LinkEvents() = default;
  // Called for frames of every kind except `data` and `taken`. `payload` is a note's payload; it is valid only during
  // the call.
  virtual void on_frame(int peer, const Frame& frame, std::span<const std::byte> payload) = 0;
  virtual bool expects(const OperationKey& key) const = 0;  // true if the operation is in flight on this rank
  virtual void on_loss(int peer, LossKind kind, const std::string& why) = 0;
  // The link cannot send the bytes that an operation offered. The link repeats the call while this condition lasts.
  virtual void on_stuck(const OperationKey& key, const std::string& why) = 0;
};

class Link {
 public:
  Link(int peer, LinkEvents& events) : peer_(peer), events_(events) {}
  virtual ~Link() = default;
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  int peer() const { return peer_; }
  OutStream& out(const StreamKey& key);
  InStream& in(const StreamKey& key) { return in_[key]; }
  // Queues `size` bytes on a stream. `rail` selects a connection, modulo the number of connections.
  void offer(const StreamKey& key, const std::byte* data, size_t size, uint16_t rail = 0);

  virtual void send(const Frame& frame) = 0;
  // Sends the frame of a round or control message with a payload of at most kNoteBytes. Copies the payload, and sets
  // the frame's slot, offset and length.
  virtual void send_note(const Frame& frame, std::span<const std::byte> payload) = 0;
  // Returns the address of `size` bytes at `offset` of the peer's segment; null if the segment is not mapped here.
  virtual std::byte* reach(uint64_t, uint64_t) const { return nullptr; }
  // Returns at most `most` of the stream's next bytes, readable in place until consumed. Empty if nothing has arrived.
  virtual std::span<const std::byte> peek(InStream& stream, size_t most);
  // Copies at most `most` of the stream's next bytes to `target` and returns their number. The caller must still
  // consume them. Until the operation is closed, the link may write bytes that arrive later directly to `target`.
  virtual size_t copy(InStream& stream, std::byte* target, size_t most);
  virtual void consume(const StreamKey& key, InStream& stream, size_t size) = 0;
  virtual bool pump() = 0;  // sends as much as possible without blocking; true if anything was sent
  bool drained(const OperationKey& key) const;  // true if the peer took every byte offered for the operation
  // True if frames wait for room and no event will announce that room; the caller must poll.
  virtual bool congested() const { return false; }
  // Returns true if the operation has failed on the peer, so that the peer's memory may hold other data. Call this
  // after reading the peer's bytes and before using the result.
  virtual bool has_failed(const OperationKey&) { return false; }
  // Drops the operation's streams. The link does not touch the operation's memory afterwards.
  virtual void close(const OperationKey& key);

 protected:
  virtual OutStream fresh_out() const { return {}; }

  const int peer_;
  LinkEvents& events_;
  std::map<StreamKey, OutStream> out_;
  std::map<StreamKey, InStream> in_;
};

}  // namespace multiring
