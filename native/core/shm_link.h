// The shm engine: frames through rings in shared memory, payload read where it lies.
//
// Bytes inside the sender's segment are offered by (offset, length) and read in place by the peer: no copy. Other
// memory is read by the peer straight from where it lies, one copy, if the kernel lets it (process_vm_readv; each pair
// tries once); else it is copied into staging slots of the sender's segment, and out again.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "descriptor.h"
#include "link.h"
#include "segment.h"

namespace multiring {

// Wakes local ranks that sleep on their sockets: one datagram, no connection, no descriptor a peer.
//
// Whoever is in the network namespace can send to the name, of whatever user. A doorbell is therefore rung with a word
// that only the job's ranks know, and the kernel drops other datagrams where they are sent: they neither wake this
// process nor fill its queue.
class Doorbell {
 public:
  using Word = std::array<uint8_t, 16>;
  Doorbell(const std::string& own_name, const Word& word);  // abstract name to be rung at, and with what
  int fd() const { return fd_.get(); }
  void ring(const std::string& name, const Word& word) const;
  int silence() const;  // discards what has arrived, a bounded number at a time; returns how many rang

 private:
  Descriptor fd_;
  Word word_;
};

// What the links of one rank share, so that what they keep does not grow with their number.
struct ShmBuffers {
  static constexpr uint32_t kMostSlots = 64;  // staging slots beyond the first of each stream: 8 MiB
  static constexpr size_t kMostSpare = 8;     // 4 MiB
  uint32_t slots = 0;
  std::vector<std::unique_ptr<std::byte[]>> spare;  // buffers for foreign bytes, of streams that have ended
};

class ShmLink final : public Link {
 public:
  struct Ends {
    std::shared_ptr<Segment> own;
    std::shared_ptr<ShmBuffers> beside;
    std::unique_ptr<Mapping> theirs;
    uint32_t own_index;    // this rank among its host's ranks
    uint32_t their_index;  // the peer among them
    std::string their_doorbell;
    Doorbell::Word their_doorbell_word;
    int their_pid;           // 0: of another pid namespace, its memory cannot be read
    uint64_t their_witness;  // address of their witness word, and what it holds
    uint64_t their_witness_value;
  };
  ShmLink(int peer, LinkEvents& events, const Doorbell& doorbell, Ends ends);
  ~ShmLink() override;

  void send(const Frame& frame) override;
  void send_note(const Frame& frame, std::span<const std::byte> payload) override;
  std::byte* reach(uint64_t offset, uint64_t size) const override;
  std::span<const std::byte> peek(InStream& stream, size_t most) override;
  size_t copy(InStream& stream, std::byte* target, size_t most) override;
  void consume(const StreamKey& key, InStream& stream, size_t size) override;
  bool pump() override;
  void close(const OperationKey& key) override;
  bool congested() const override { return !backlog_.empty(); }
  bool has_failed(const OperationKey& key) override {
    std::atomic_thread_fence(std::memory_order_acquire);  // against Failures::enter
    if (ends_.theirs->failures().count.load(std::memory_order_relaxed) != failures_read_) read_failures();
    return !failed_.empty() && failed_.contains(key);
  }

  void wake() const;  // has the peer look what there is, also where it sleeps
  bool receive();  // takes every frame out of the peer's ring; true if there was one
  uint32_t their_index() const { return ends_.their_index; }
  bool is_read_by_peer() const { return is_read_; }

 private:
  static constexpr size_t kSlotBytes = 128 * 1024;
  static constexpr uint32_t kSlots = 8;  // more only where a stream would otherwise have none
  static constexpr uint32_t kIdleSlots = 2;  // that a link keeps while it has nothing to do, for notes
  static constexpr size_t kFetchBytes = 512 * 1024;  // small enough to stay in cache until it is combined

  bool push(const Frame& frame);
  bool stage(const StreamKey& key, OutStream& stream);
  void take(const Frame& frame);
  bool find_slot(const OutStream& stream);
  void drop_idle_slots();
  bool fetch(const std::byte* from, std::byte* to, size_t size);
  void read_failures();
  void give_back(const OperationKey& key, uint16_t channel, uint32_t slot, uint64_t size);

  const Doorbell& doorbell_;
  Ends ends_;
  std::deque<Frame> backlog_;  // frames that found the ring full
  static constexpr size_t kMostFailed = 4096;
  uint64_t failures_read_ = 0;     // of the peer's
  std::set<OperationKey> failed_;  // over there, and no frame has told of it yet
  std::deque<OperationKey> failed_in_order_;
  bool is_read_ = false;  // the peer has said that it can read this rank's own memory
  std::vector<std::byte*> slots_;
  std::vector<uint32_t> free_slots_;
};

}  // namespace multiring
