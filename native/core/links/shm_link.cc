#include "shm_link.h"

#include <linux/filter.h>
#include <linux/futex.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <vector>

#include "memory/abstract_socket.h"
#include "memory/fault.h"

namespace multiring {
namespace {

constexpr int kSilencedATurn = 64;  // more datagrams than a queue holds by default (net.unix.max_dgram_qlen)

bool read_foreign(int pid, const std::byte* from, void* to, size_t size) {
  iovec here{to, size};
  iovec there{const_cast<std::byte*>(from), size};
  return ::process_vm_readv(pid, &here, 1, &there, 1, 0) == static_cast<ssize_t>(size);
}

}  // namespace

Doorbell::Doorbell(const std::string& own_name, const Word& word)
    : fd_(::socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)), word_(word) {
  if (!fd_.valid()) throw_errno(FaultKind::state, "socket for wake-ups");
  // Attach the filter before the socket has a name, so that it checks every datagram. If the kernel has no such filter,
  // `silence` still ignores wrong words.
  std::vector<sock_filter> filter;
  for (uint32_t at = 0; at < word.size(); at += 4) {
    const auto left = static_cast<uint8_t>((word.size() - at) / 2 - 1);  // instructions from here to the rejection
    const uint32_t want =
        uint32_t{word[at]} << 24 | uint32_t{word[at + 1]} << 16 | uint32_t{word[at + 2]} << 8 | word[at + 3];
    filter.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, at));
    filter.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, want, 0, left));
  }
  filter.push_back(BPF_STMT(BPF_RET | BPF_K, UINT32_MAX));
  filter.push_back(BPF_STMT(BPF_RET | BPF_K, 0));
  const sock_fprog program{static_cast<unsigned short>(filter.size()), filter.data()};
  ::setsockopt(fd_.get(), SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program);
  const AbstractAddress address(own_name);
  if (::bind(fd_.get(), address.get(), address.length) != 0) {
    throw_errno(FaultKind::state, "binding the wake-up socket @" + own_name);
  }
}

void Doorbell::ring(const std::string& name, const Word& word) const {
  const AbstractAddress address(name);
  // A full queue means that the sleeper is already being woken; a missing name means that it has ended.
  [[maybe_unused]] const auto sent =
      ::sendto(fd_.get(), word.data(), word.size(), MSG_DONTWAIT | MSG_NOSIGNAL, address.get(), address.length);
}

int Doorbell::silence() const {
  int rings = 0;
  for (int turn = 0; turn < kSilencedATurn; ++turn) {
    Word said{};
    const ssize_t got = ::recv(fd_.get(), said.data(), said.size(), MSG_DONTWAIT | MSG_TRUNC);
    if (got < 0) break;
    if (got == static_cast<ssize_t>(said.size()) && said == word_) ++rings;
  }
  return rings;
}

ShmLink::ShmLink(int peer, LinkEvents& events, const Doorbell& doorbell, Ends ends)
    : Link(peer, events), doorbell_(doorbell), ends_(std::move(ends)) {
  uint64_t value = 0;
  const auto* witness = reinterpret_cast<const std::byte*>(ends_.their_witness);
  if (ends_.their_pid > 0 && read_foreign(ends_.their_pid, witness, &value, sizeof value) &&
      value == ends_.their_witness_value) {
    send({.kind = FrameKind::reads});
  }
}

ShmLink::~ShmLink() {
  for (std::byte* slot : slots_) ends_.own->release(slot);
  ends_.beside->slots -= static_cast<uint32_t>(slots_.size());
}

void ShmLink::wake() const {
  auto& control = ends_.theirs->control();
  const uint32_t bit = ends_.own_index;
  control.pending[bit / 64].fetch_or(uint64_t{1} << (bit % 64), std::memory_order_seq_cst);
  if (control.sleepers.load(std::memory_order_seq_cst) == 0) return;
  const uint32_t sleepers = control.sleepers.exchange(0, std::memory_order_seq_cst);
  if ((sleepers & ControlPage::kFutexSleeper) != 0) {
    ::syscall(SYS_futex, &control.sleepers, FUTEX_WAKE, 1, nullptr, nullptr, 0);
  } else if ((sleepers & ControlPage::kSocketSleeper) != 0) {
    doorbell_.ring(ends_.their_doorbell, ends_.their_doorbell_word);
  }
}

bool ShmLink::push(const Frame& frame) {
  Ring& ring = ends_.theirs->ring_from(ends_.own_index);
  const uint64_t at = ring.produced.load(std::memory_order_relaxed);
  if (at - ring.consumed.load(std::memory_order_acquire) >= Ring::kEntries) return false;
  ring.entries[at % Ring::kEntries] = frame;
  ring.produced.store(at + 1, std::memory_order_release);
  wake();
  // Ring at once for these frames: a peer that is busy otherwise checks its rings only once a second.
  if (frame.kind == FrameKind::control || frame.kind == FrameKind::fail)
    doorbell_.ring(ends_.their_doorbell, ends_.their_doorbell_word);
  return true;
}

void ShmLink::send(const Frame& frame) {
  if (!backlog_.empty() || !push(frame)) backlog_.push_back(frame);
}

void ShmLink::send_note(const Frame& frame, std::span<const std::byte> payload) {
  Frame note = frame;
  note.length = payload.size();
  if (!payload.empty()) {
    find_slot({});
    note.slot = free_slots_.back();
    free_slots_.pop_back();
    note.offset = static_cast<uint64_t>(slots_[note.slot] - ends_.own->mapping().base());
    std::memcpy(slots_[note.slot], payload.data(), payload.size());
  }
  send(note);
}

std::byte* ShmLink::reach(uint64_t offset, uint64_t size) const {
  const size_t room = ends_.theirs->bytes();
  return offset <= room && size <= room - offset ? ends_.theirs->base() + offset : nullptr;
}

bool ShmLink::stage(const StreamKey& key, OutStream& stream) {
  bool moved = false;
  while (!stream.pending.empty()) {
    auto& piece = stream.pending.front();
    Frame frame{.group = key.operation.group, .sequence = key.operation.sequence, .kind = FrameKind::data,
                .channel = key.channel};
    const Mapping& own = ends_.own->mapping();
    if (own.contains(piece.data, piece.size)) {
      frame.slot = kNoSlot;
      frame.offset = static_cast<uint64_t>(piece.data - own.base());
      frame.length = piece.size;
    } else if (is_read_) {
      frame.slot = kForeign;
      frame.offset = reinterpret_cast<uint64_t>(piece.data);
      frame.length = piece.size;
    } else {
      if (!find_slot(stream)) return moved;
      frame.slot = free_slots_.back();
      free_slots_.pop_back();
      ++stream.staged;
      std::byte* at = slots_[frame.slot];
      frame.length = std::min(piece.size, kSlotBytes);
      frame.offset = static_cast<uint64_t>(at - own.base());
      std::memcpy(at, piece.data, frame.length);
    }
    piece.data += frame.length;
    piece.size -= frame.length;
    if (piece.size == 0) stream.pending.pop_front();
    stream.sent += frame.length;
    send(frame);
    moved = true;
  }
  return moved;
}

// A stream without a slot always gets one. Otherwise two operations that each wait for a third rank's bytes could hold
// all slots of the links that would deliver these bytes, and never continue.
bool ShmLink::find_slot(const OutStream& stream) {
  if (!free_slots_.empty()) return true;
  const bool enough = slots_.size() >= kSlots || ends_.beside->slots >= ShmBuffers::kMostSlots;
  if (enough && stream.staged > 0) return false;
  slots_.push_back(ends_.own->allocate(kSlotBytes));
  ++ends_.beside->slots;
  free_slots_.push_back(static_cast<uint32_t>(slots_.size() - 1));
  return true;
}

// Releases the slots of an idle link, because other links may need the memory. A slot is free only after the peer has
// consumed it, so no peer reads released memory.
void ShmLink::drop_idle_slots() {
  if (!out_.empty() || slots_.size() <= kIdleSlots || free_slots_.size() < slots_.size()) return;
  for (size_t at = kIdleSlots; at < slots_.size(); ++at) ends_.own->release(slots_[at]);
  ends_.beside->slots -= static_cast<uint32_t>(slots_.size() - kIdleSlots);
  slots_.resize(kIdleSlots);
  free_slots_.resize(kIdleSlots);
  std::iota(free_slots_.begin(), free_slots_.end(), 0u);
}

bool ShmLink::pump() {
  bool moved = false;
  while (!backlog_.empty() && push(backlog_.front())) {
    backlog_.pop_front();
    moved = true;
  }
  for (auto& [key, stream] : out_) {
    try {
      moved |= stage(key, stream);
    } catch (const Fault& full) {  // the segment is full; the caller may be pumping for another operation
      events_.on_stuck(key.operation, full.what());
    }
  }
  return moved;
}

void ShmLink::take(const Frame& frame) {
  const auto found = out_.find({frame.key(), frame.channel});
  const bool slot = frame.slot < slots_.size();
  if (found != out_.end()) {
    found->second.taken += frame.length;
    if (slot) --found->second.staged;
  }
  if (slot) free_slots_.push_back(frame.slot);
  drop_idle_slots();
}

bool ShmLink::receive() {
  Ring& ring = ends_.own->mapping().ring_from(ends_.their_index);
  uint64_t at = ring.consumed.load(std::memory_order_relaxed);
  const uint64_t end = ring.produced.load(std::memory_order_acquire);
  const bool any = at != end;
  for (; at != end; ++at) {
    const Frame frame = ring.entries[at % Ring::kEntries];
    ring.consumed.store(at + 1, std::memory_order_release);
    if (frame.kind == FrameKind::taken) {
      take(frame);
    } else if (frame.kind == FrameKind::reads) {
      is_read_ = true;
    } else if (frame.kind == FrameKind::data) {
      const bool foreign = frame.slot == kForeign;
      const std::byte* data =
          foreign ? reinterpret_cast<const std::byte*>(frame.offset) : reach(frame.offset, frame.length);
      if (data == nullptr) {
        events_.on_loss(peer_, LossKind::died, "it offered bytes outside its segment");
        return true;
      }
      if (!events_.expects(frame.key())) {  // the operation failed here, so its bytes are not needed
        give_back(frame.key(), frame.channel, frame.slot, frame.length);
        continue;
      }
      in({frame.key(), frame.channel})
          .pieces.push_back({data, frame.length, frame.length, frame.slot, nullptr});
    } else if ((frame.kind == FrameKind::round || frame.kind == FrameKind::control) && frame.length > 0) {
      const std::byte* payload = frame.length <= kNoteBytes ? reach(frame.offset, frame.length) : nullptr;
      if (payload == nullptr) {
        events_.on_loss(peer_, LossKind::died, "it sent a note from outside its segment");
        return true;
      }
      events_.on_frame(peer_, frame, {payload, frame.length});
      give_back(frame.key(), kNoteChannel, frame.slot, frame.length);
    } else {
      events_.on_frame(peer_, frame, {});
      if (frame.kind == FrameKind::fail) failed_.erase(frame.key());  // the frame has reported the failure
    }
  }
  return any;
}

bool ShmLink::fetch(const std::byte* from, std::byte* to, size_t size) {
  if (read_foreign(ends_.their_pid, from, to, size)) return true;
  // EFAULT: the peer has freed the memory after its operation failed. The frame that reports the failure will follow.
  if (errno != EFAULT) {
    events_.on_loss(peer_, LossKind::died, std::string("its memory cannot be read: ") + std::strerror(errno));
  }
  return false;
}

std::span<const std::byte> ShmLink::peek(InStream& stream, size_t most) {
  if (stream.pieces.empty() || stream.pieces.front().slot != kForeign) return Link::peek(stream, most);
  const auto& piece = stream.pieces.front();
  if (stream.fetched_size == 0) {
    auto& spare = ends_.beside->spare;
    if (!stream.fetched && !spare.empty()) {  // fresh memory would cost a page fault per 4 KiB
      stream.fetched = std::move(spare.back());
      spare.pop_back();
    }
    if (!stream.fetched) stream.fetched = std::make_unique_for_overwrite<std::byte[]>(kFetchBytes);
    const size_t size = std::min({piece.size, most, kFetchBytes});
    if (!fetch(piece.data, stream.fetched.get(), size)) return {};
    stream.fetched_size = size;
    stream.fetched_from = stream.fetched.get();
  }
  return {stream.fetched_from, std::min(stream.fetched_size, most)};
}

size_t ShmLink::copy(InStream& stream, std::byte* target, size_t most) {
  const bool foreign = !stream.pieces.empty() && stream.pieces.front().slot == kForeign && stream.fetched_size == 0;
  if (!foreign) return Link::copy(stream, target, most);
  const auto& piece = stream.pieces.front();
  const size_t size = std::min(piece.size, most);
  return fetch(piece.data, target, size) ? size : 0;
}

void ShmLink::consume(const StreamKey& key, InStream& stream, size_t size) {
  auto& piece = stream.pieces.front();
  const size_t from_fetched = std::min(size, stream.fetched_size);
  stream.fetched_size -= from_fetched;
  stream.fetched_from += from_fetched;
  piece.data += size;
  piece.size -= size;
  if (piece.size > 0) return;
  give_back(key.operation, key.channel, piece.slot, piece.whole);
  stream.pieces.pop_front();
}

void ShmLink::give_back(const OperationKey& key, uint16_t channel, uint32_t slot, uint64_t size) {
  send({.group = key.group, .sequence = key.sequence, .kind = FrameKind::taken, .channel = channel, .slot = slot,
        .length = size});
}

void ShmLink::read_failures() {
  const Failures& theirs = ends_.theirs->failures();
  const uint64_t end = theirs.count.load(std::memory_order_acquire);
  for (uint64_t at = failures_read_; at != end; ++at) {
    const Failures::Entry& entry = theirs.entries[at % Failures::kEntries];
    const OperationKey key{entry.group.load(std::memory_order_relaxed), entry.sequence.load(std::memory_order_relaxed)};
    if (failed_.insert(key).second) failed_in_order_.push_back(key);
    // Failures without a frame belong to groups without this rank.
    if (failed_in_order_.size() > kMostFailed) {
      failed_.erase(failed_in_order_.front());
      failed_in_order_.pop_front();
    }
  }
  std::atomic_thread_fence(std::memory_order_acquire);
  if (theirs.count.load(std::memory_order_relaxed) - failures_read_ >=
      Failures::kEntries) {  // entries have been overwritten
    events_.on_loss(peer_, LossKind::died, "more operations failed there at once than it can report");
  }
  failures_read_ = end;
}

void ShmLink::close(const OperationKey& key) {
  // Return the slots of unconsumed pieces to their owner; otherwise the owner would lose them.
  for (auto at = in_.lower_bound({key, 0}); at != in_.end() && at->first.operation == key; ++at) {
    auto& spare = ends_.beside->spare;
    if (at->second.fetched && spare.size() < ShmBuffers::kMostSpare) spare.push_back(std::move(at->second.fetched));
    for (const auto& piece : at->second.pieces) {
      if (piece.slot < kForeign) give_back(key, at->first.channel, piece.slot, piece.whole);
    }
  }
  Link::close(key);
  drop_idle_slots();
}

}  // namespace multiring
