#include "mpi_link.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <utility>

namespace multiring {
namespace {

constexpr uint64_t kMostUnsaid = 4;             // most arrived bounce buffers without confirmation
constexpr uint64_t kTellingBytes = 128 * 1024;  // smallest goodput sample; latency dominates smaller samples
constexpr double kLatelyBytes = 2 << 20;        // bytes after which older goodput samples count half

}  // namespace

MpiLink::~MpiLink() { give_up(); }

void MpiLink::give_up() {
  if (std::exchange(is_gone_, true)) return;
  proxy_.expect_landings(-static_cast<int64_t>(aloft_.size()));
  aloft_.clear();
  proxy_.forget(peer_);
  key_of_.clear();
  unwanted_.clear();
}

void MpiLink::on_loss(int peer, LossKind kind, const std::string& why) {
  give_up();
  events_.on_loss(peer, kind, why);
}

void MpiLink::break_off(const std::string& why) {
  if (is_gone_) return;
  connection_.hang_up();
  on_loss(peer_, LossKind::died, why);
}

// ---- out -----------------------------------------------------------------------------------

bool MpiLink::pump() {
  bool any = false;
  for (auto& [key, stream] : out_) {
    while (!is_gone_ && !stream.pending.empty() && stream.sent < stream.credit) {
      dispatch(key, stream);
      any = true;
    }
  }
  return connection_.pump() || any;
}

void MpiLink::dispatch(const StreamKey& key, OutStream& stream) {
  MpiProxy::Memory memory = proxy_.memory();
  const size_t room = std::min<uint64_t>(MpiProxy::kBounceBytes, stream.credit - stream.sent);
  size_t size = 0;
  while (size < room && !stream.pending.empty()) {
    auto& piece = stream.pending.front();
    // Offers, credit and the buffer's size are multiples of an element, so no element is split.
    const size_t part = std::min(piece.size, room - size);
    std::memcpy(memory.get() + size, piece.data, part);
    size += part;
    piece.data += part;
    piece.size -= part;
    if (piece.size == 0) stream.pending.pop_front();
  }
  stream.sent += size;
  stream.taken += size;
  const uint32_t tag = next_tag_++ % kTags;
  if (aloft_.empty()) {
    aloft_from_ = Clock::now();
    aloft_landed_ = 0;
  }
  aloft_.push_back(size);
  proxy_.expect_landings(1);
  proxy_.hand_over(peer_, tag, true, std::move(memory), size);
  send({.group = key.operation.group, .sequence = key.operation.sequence, .kind = FrameKind::mpi_message,
        .channel = key.channel, .slot = tag, .length = size});
}

// ---- in ------------------------------------------------------------------------------------

void MpiLink::on_frame(int peer, const Frame& frame, std::span<const std::byte> payload) {
  if (is_gone_) return;
  if (frame.kind == FrameKind::mpi_message) {
    expect(frame);
  } else if (frame.kind == FrameKind::granted) {
    const auto found = out_.find({frame.key(), frame.channel});
    if (found != out_.end()) found->second.credit += frame.length;
    pump();
  } else if (frame.kind == FrameKind::landed) {
    note_landed(frame.length);
  } else {
    events_.on_frame(peer, frame, payload);
  }
}

void MpiLink::note_landed(uint64_t bounces) {
  if (bounces > aloft_.size()) {
    break_off("it confirmed " + std::to_string(bounces) + " messages, but only " + std::to_string(aloft_.size()) +
              " were in transit");
    return;
  }
  const auto end = aloft_.begin() + static_cast<std::ptrdiff_t>(bounces);
  aloft_landed_ = std::accumulate(aloft_.begin(), end, aloft_landed_);
  aloft_.erase(aloft_.begin(), end);
  proxy_.expect_landings(-static_cast<int64_t>(bounces));
  if (aloft_landed_ < kTellingBytes) return;
  const auto now = Clock::now();
  // One frame may confirm several messages, so the rate is computed over several samples. Older samples count less.
  goodput_bytes_ += static_cast<double>(std::exchange(aloft_landed_, 0));
  goodput_s_ += std::chrono::duration<double>(now - std::exchange(aloft_from_, now)).count();
  while (goodput_bytes_ > kLatelyBytes) {
    goodput_bytes_ /= 2;
    goodput_s_ /= 2;
  }
}

uint64_t MpiLink::goodput() const {
  return goodput_s_ > 0 ? static_cast<uint64_t>(goodput_bytes_ / goodput_s_) : 0;
}

void MpiLink::expect(const Frame& frame) {
  if (frame.length == 0 || frame.length > MpiProxy::kBounceBytes || frame.slot >= kTags) {
    break_off("it announced an invalid message of " + std::to_string(frame.length) + " bytes, tag " +
              std::to_string(frame.slot));
    return;
  }
  const uint64_t number = proxy_.hand_over(peer_, frame.slot, false, proxy_.memory(), frame.length);
  const StreamKey key{frame.key(), frame.channel};
  if (events_.expects(frame.key())) {
    key_of_[number] = key;
    expected_[key].push_back({number, frame.length, nullptr});
  } else {
    unwanted_.insert(number);  // the operation failed here, but the message must still be received
  }
}

void MpiLink::arrived(uint64_t number, MpiProxy::Memory memory) {
  if (is_gone_) return;
  ++unsaid_;
  const auto found = key_of_.find(number);
  if (found == key_of_.end()) {
    unwanted_.erase(number);
    proxy_.recycle(std::move(memory));
  } else {
    const StreamKey key = found->second;
    key_of_.erase(found);
    auto& queue = expected_.at(key);
    std::find_if(queue.begin(), queue.end(), [&](const Expected& each) { return each.number == number; })->memory =
        std::move(memory);
    while (!queue.empty() && queue.front().memory != nullptr) {
      Expected& next = queue.front();
      const std::byte* data = next.memory.get();
      Payload owned(next.memory.release(), [&room = proxy_](std::byte* back) { room.recycle(MpiProxy::Memory(back)); });
      in(key).pieces.push_back({data, next.size, next.size, kNoSlot, std::move(owned)});
      queue.pop_front();
    }
    if (queue.empty()) expected_.erase(key);
  }
  if (unsaid_ >= kMostUnsaid || (key_of_.empty() && unwanted_.empty())) {
    send({.kind = FrameKind::landed, .length = std::exchange(unsaid_, 0)});
  }
}

void MpiLink::consume(const StreamKey& key, InStream& stream, size_t size) {
  auto& piece = stream.pieces.front();
  piece.data += size;
  piece.size -= size;
  stream.ungranted += size;
  if (piece.size == 0) stream.pieces.pop_front();
  if (stream.ungranted < kWindow / 4) return;
  send({.group = key.operation.group, .sequence = key.operation.sequence, .kind = FrameKind::granted,
        .channel = key.channel, .length = std::exchange(stream.ungranted, 0)});
}

void MpiLink::close(const OperationKey& key) {
  for (auto at = expected_.lower_bound({key, 0}); at != expected_.end() && at->first.operation == key;) {
    for (Expected& each : at->second) {
      if (each.memory != nullptr) continue;
      key_of_.erase(each.number);
      unwanted_.insert(each.number);
    }
    at = expected_.erase(at);
  }
  Link::close(key);
}

}  // namespace multiring
