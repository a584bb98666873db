// The transport contract: what carries frames and byte streams between this rank and one peer.
//
// Streams are named by (operation, channel), one in each direction, and deliver bytes in order.
// `offer` never blocks: the memory must stay readable until `out(key).drained()`. `in(key).pieces`
// are views of what has arrived; `consume` hands them back, which is what lets the sender go on.
// No data is sent before every rank of the operation has agreed to it, so a receiver's memory for
// operations it has not posted is bounded by frames, never by payload.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <string>

#include "frame.h"
#include "payload.h"

namespace multiring {

struct StreamKey {
  OperationKey operation;
  uint16_t channel = 0;
  auto operator<=>(const StreamKey&) const = default;
};

// Bytes offered to a peer and not yet handed on.
struct OutStream {
  struct Piece {
    const std::byte* data;
    size_t size;
  };
  std::deque<Piece> pending;
  uint64_t offered = 0;  // bytes
  uint64_t taken = 0;    // bytes the offered memory is no longer needed for
  uint64_t sent = 0;     // bytes handed to the wire (tcp: bounded by credit)
  uint32_t staged = 0;   // shm: staging slots it holds
  uint64_t credit = 0;   // tcp: bytes the peer has room for, counted from the stream's start
  static constexpr uint16_t kNoCarrier = UINT16_MAX;
  uint16_t rail = 0;              // tcp: the one it was offered on
  uint16_t carrier = kNoCarrier;  // tcp: the one it travels on
  bool drained() const { return offered == taken; }
};

// Bytes that arrived and are not yet consumed.
struct InStream {
  struct Piece {
    const std::byte* data;  // here, or in the peer's own memory (kForeign)
    size_t size;
    size_t whole;   // size when it arrived
    uint32_t slot;  // shm: the sender's staging slot, kNoSlot or kForeign
    Payload owned;  // tcp; null: received where it belongs
  };
  std::deque<Piece> pieces;
  std::unique_ptr<std::byte[]> fetched;  // the first bytes of a foreign piece
  const std::byte* fetched_from = nullptr;
  size_t fetched_size = 0;
  uint64_t ungranted = 0;  // tcp: bytes consumed since the last credit
  uint64_t arrived = 0;    // tcp: bytes, in whole frames
  // tcp: where the bytes from `landing_from` up to `landing_to` of the stream belong; null: nowhere known yet
  std::byte* landing = nullptr;
  uint64_t landing_from = 0;
  uint64_t landing_to = 0;
};

inline constexpr size_t kNoteBytes = 64 * 1024;
inline constexpr uint16_t kNoteChannel = UINT16_MAX;  // whose staging slots are handed back; no stream has it
inline constexpr uint32_t kNoSlot = UINT32_MAX;       // bytes in the sender's segment
inline constexpr uint32_t kForeign = UINT32_MAX - 1;  // bytes at an address of the sender's own memory

// What a link tells the rank it belongs to.
class LinkEvents {
 public:
  virtual ~LinkEvents() = default;
  // Every kind but data and taken; `payload` is what a note brought, and gone when this returns.
  virtual void on_frame(int peer, const Frame& frame, std::span<const std::byte> payload) = 0;
  virtual bool expects(const OperationKey& key) const = 0;  // whether the operation is in flight here
  virtual void on_loss(int peer, LossKind kind, const std::string& why) = 0;
  // What an operation offered cannot be handed on. Said again as long as that is so.
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
  // `rail`: which of several connections should carry the stream, counted from 0 and round again.
  void offer(const StreamKey& key, const std::byte* data, size_t size, uint16_t rail = 0);

  virtual void send(const Frame& frame) = 0;
  // A round's or a control message's frame and at most kNoteBytes with it; they are copied. Sets the frame's slot,
  // offset and length.
  virtual void send_note(const Frame& frame, std::span<const std::byte> payload) = 0;
  // `size` bytes at `offset` of the peer's segment; null: none of it can be reached from here.
  virtual std::byte* reach(uint64_t, uint64_t) const { return nullptr; }
  // The stream's next bytes, at most `most`, readable in place until consumed; empty: nothing has arrived.
  virtual std::span<const std::byte> peek(InStream& stream, size_t most);
  // Copies at most `most` of the stream's next bytes to `target`; returns how many. They still are to be consumed.
  // Until the operation is closed, what then arrives of them may be written there at any time.
  virtual size_t copy(InStream& stream, std::byte* target, size_t most);
  virtual void consume(const StreamKey& key, InStream& stream, size_t size) = 0;
  virtual bool pump() = 0;  // hands on what can be handed on without blocking; true if anything was
  bool drained(const OperationKey& key) const;  // every byte offered for the operation was taken
  virtual bool congested() const { return false; }  // frames wait for room that nobody announces
  // Whether the peer's memory may hold something else than what the operation put there, as the operation failed over
  // there. Asked after its bytes were read, and before what was made of them is passed on.
  virtual bool has_failed(const OperationKey&) { return false; }
  // Forgets the operation's streams; afterwards its memory is never touched again.
  virtual void close(const OperationKey& key);

 protected:
  virtual OutStream fresh_out() const { return {}; }

  const int peer_;
  LinkEvents& events_;
  std::map<StreamKey, OutStream> out_;
  std::map<StreamKey, InStream> in_;
};

}  // namespace multiring
