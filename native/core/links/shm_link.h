// The shm engine: frames travel through rings in shared memory, and peers read payload in place.
//
// The peer reads bytes of the sender's segment in place, given their offset and length: no copy. The peer reads
// ordinary memory with process_vm_readv, one copy, if the kernel permits it; each pair of ranks tries once. Otherwise
// the sender copies the bytes into staging slots of its segment, and the peer copies them out.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "link.h"
#include "memory/descriptor.h"
#include "memory/segment.h"

namespace multiring {

// Wakes local ranks that sleep on their sockets. A ring is one datagram, so peers need no connection or descriptor.
//
// Every process in the network namespace can send to the doorbell's name, even as another user. Therefore a ring must
// contain a word that only the job's ranks know. The kernel drops other datagrams at the sender: they neither wake this
// process nor fill its queue.
class Doorbell {
 public:
  using Word = std::array<uint8_t, 16>;
  Doorbell(const std::string& own_name, const Word& word);  // the abstract socket name, and the word that rings it
  int fd() const { return fd_.get(); }
  void ring(const std::string& name, const Word& word) const;
  int silence() const;  // discards a bounded number of datagrams; returns how many of them were valid rings

 private:
  Descriptor fd_;
  Word word_;
};

// Buffers shared by the links of one rank, so that the kept memory does not grow with the number of links.
struct ShmBuffers {
  static constexpr uint32_t kMostSlots = 64;  // most staging slots (8 MiB), except that each stream may have one
  static constexpr size_t kMostSpare = 8;     // most spare buffers (4 MiB)
  uint32_t slots = 0;
  std::vector<std::unique_ptr<std::byte[]>> spare;  // fetch buffers of closed streams, for reuse
};

class ShmLink final : public Link {
 public:
  struct Ends {
    std::shared_ptr<Segment> own;
    std::shared_ptr<ShmBuffers> beside;
    std::unique_ptr<Mapping> theirs;
    uint32_t own_index;    // position of this rank among its host's ranks
    uint32_t their_index;  // position of the peer among its host's ranks
    std::string their_doorbell;
    Doorbell::Word their_doorbell_word;
    int their_pid;           // 0 if its ordinary memory must not or cannot be read
    uint64_t their_witness;  // address of the peer's witness word
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
    std::atomic_thread_fence(std::memory_order_acquire);  // pairs with the fence in Failures::enter
    if (ends_.theirs->failures().count.load(std::memory_order_relaxed) != failures_read_) read_failures();
    return !failed_.empty() && failed_.contains(key);
  }

  void wake() const;  // makes the peer check its rings, and wakes it if it sleeps
  bool receive();  // takes all frames out of the peer's ring; true if there were any
  uint32_t their_index() const { return ends_.their_index; }
  bool is_read_by_peer() const { return is_read_; }

 private:
  static constexpr size_t kSlotBytes = 128 * 1024;
  static constexpr uint32_t kSlots = 8;      // staging slots of a link; more only for streams without a slot
  static constexpr uint32_t kIdleSlots = 2;  // staging slots that an idle link keeps for notes
  static constexpr size_t kFetchBytes = 512 * 1024;  // small enough to stay in cache until the bytes are combined

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
  std::deque<Frame> backlog_;  // frames that did not fit into the peer's ring
  static constexpr size_t kMostFailed = 4096;
  uint64_t failures_read_ = 0;     // number of the peer's failure entries read so far
  std::set<OperationKey> failed_;  // operations that failed on the peer, until the peer's `fail` frame arrives
  std::deque<OperationKey> failed_in_order_;
  bool is_read_ = false;  // true if the peer has reported that it can read this rank's ordinary memory
  std::vector<std::byte*> slots_;
  std::vector<uint32_t> free_slots_;
};

}  // namespace multiring
