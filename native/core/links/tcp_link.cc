#include "tcp_link.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace multiring {
namespace {

// A process that ends closes its rails one after another. Within this time, the loss of one rail is not reported.
constexpr auto kEndOfAPeer = std::chrono::milliseconds(500);

}  // namespace

TcpLink::TcpLink(int peer, LinkEvents& events, Poller& poller, Rails rails)
    : Link(peer, events),
      deals_(!rails.threads.empty()),
      rail_timeout_(rails.timeout),
      wire_timeout_(rails.wire_timeout),
      pool_(std::move(rails.pool)) {
  for (uint16_t i = 0; !deals_ && i < rails.count; ++i) {
    rails_.push_back(std::make_unique<Rail>(i, peer, rails.count > 1, wire_timeout_ / 8, *this, poller));
  }
  for (const auto& thread : rails.threads) {
    const auto index = static_cast<uint16_t>(rails_.size());
    rails_.push_back(std::make_unique<Rail>(index, peer, false, wire_timeout_ / 8, *this, poller, thread.get()));
  }
}

// ---- connecting ----------------------------------------------------------------------------

void TcpLink::call(uint16_t rail, const std::string& host, uint16_t port, const std::string& from,
                   const Handshake::Self& self, Clock::time_point deadline) {
  rails_[rail]->call(host, port, from, self, deadline);
}

void TcpLink::adopt(uint16_t rail, Descriptor socket, std::unique_ptr<SealedStream> stream) {
  rails_[rail]->adopt(std::move(socket), std::move(stream));
}

void TcpLink::on_up(Rail&) {
  if (first_up_at_ == Clock::time_point{}) first_up_at_ = Clock::now();
  begin_if_ready();
}

bool TcpLink::established() const {
  return first_up() != nullptr &&
         std::none_of(rails_.begin(), rails_.end(), [](const auto& rail) { return rail->is_pending(); });
}

bool TcpLink::holds_frames() const { return !broken_ && (!held_.empty() || is_sending()); }

bool TcpLink::is_sending() const {
  return !broken_ &&
         std::any_of(rails_.begin(), rails_.end(), [](const auto& rail) { return rail->holds_frames(); });
}

size_t TcpLink::in_transit() const {
  size_t sum = 0;
  for (const auto& rail : rails_) sum += rail->in_transit();
  return sum;
}

bool TcpLink::is_open() const {
  return std::any_of(rails_.begin(), rails_.end(), [](const auto& rail) { return rail->is_open(); });
}

std::vector<uint16_t> TcpLink::rails_not_up() const {
  std::vector<uint16_t> found;
  for (const auto& rail : rails_) {
    if (!rail->is_up()) found.push_back(rail->index());
  }
  return found;
}

// Frames are sent only after all rails are connected or lost. A stream that has started on one rail cannot move to
// another rail in order without sending frames again.
void TcpLink::begin_if_ready() {
  if (begun_ || !established()) return;
  begun_ = true;
  Rail& rail = *first_up();
  for (Outgoing& outgoing : std::exchange(held_, {})) rail.push(std::move(outgoing));
  pump();
}

void TcpLink::tend_calls() {
  for (const auto& rail : rails_) rail->tend_call();
}

bool TcpLink::is_calling() const {
  return std::any_of(rails_.begin(), rails_.end(), [](const auto& rail) { return rail->is_calling(); });
}

void TcpLink::hang_up() {
  for (const auto& rail : rails_) rail->hang_up();
}

// ---- losing rails --------------------------------------------------------------------------

Rail* TcpLink::first_up() const {
  const auto found = std::find_if(rails_.begin(), rails_.end(), [](const auto& rail) { return rail->is_up(); });
  return found == rails_.end() ? nullptr : found->get();
}

void TcpLink::on_broken(Rail& rail, const std::string& why) {
  if (deals_) {
    // A peer that leaves closes its connections one after another, each after its announcement.
    const bool others = std::any_of(rails_.begin(), rails_.end(), [](const auto& r) { return r->is_up(); });
    if (rail.has_left && others) return;
    break_off(LossKind::died, why + " (connection " + std::to_string(rail.index() + 1) + " of " +
                                  std::to_string(rails_.size()) + ")");
    return;
  }
  const bool others =
      std::any_of(rails_.begin(), rails_.end(), [](const auto& r) { return r->is_up() || r->is_pending(); });
  if (others) {
    lose(rail, why);
  } else {
    break_off(LossKind::died, why);
  }
}

void TcpLink::break_off(LossKind kind, const std::string& why) {
  if (broken_) return;
  broken_ = true;
  for (const auto& rail : rails_) rail->close();
  held_.clear();
  losses_.clear();
  events_.on_loss(peer_, kind, why);
}

// Sends the unacknowledged frames of the rail over another rail. The receiver drops frames that arrive twice.
void TcpLink::lose(Rail& rail, const std::string& why) {
  rail.give_up();
  std::deque<Outgoing> frames = rail.take_unacknowledged();
  if (!rail.has_left) losses_.push_back({peer_, rail.index(), why, Clock::now()});
  begin_if_ready();
  Rail* other = first_up();
  if (other == nullptr) {  // the other rails are still connecting
    held_.insert(held_.begin(), std::make_move_iterator(frames.begin()), std::make_move_iterator(frames.end()));
    return;
  }
  for (auto& [key, stream] : out_) {
    if (stream.carrier == rail.index()) stream.carrier = other->index();
  }
  std::stable_partition(frames.begin(), frames.end(), [](const Outgoing& outgoing) { return !outgoing.is_data(); });
  other->push_first(std::move(frames));
  send({.kind = FrameKind::rail, .offset = rail.index()});
}

// The kernel's own time-outs are not suitable: they take minutes, and shorter settings also end the connection to a
// process that is only stopped. A kernel answers for a stopped process, so silence means that the wire is broken.
void TcpLink::watch_rails() {
  if (!keeps() || broken_) return;
  const auto now = Clock::now();
  const double half_s = std::chrono::duration<double>(rail_timeout_).count() / 2;
  const bool one_works = std::any_of(rails_.begin(), rails_.end(), [half_s](const auto& rail) {
    const auto health = rail->health();
    return rail->is_up() && !(health.waits && health.quiet_s >= half_s);
  });
  for (const auto& rail : rails_) {
    const bool late = rail->is_pending() && first_up() != nullptr && now - first_up_at_ > rail_timeout_;
    const bool dead = rail->is_up() && rail->silence(rail->last_look, rail_timeout_ / 4) > rail_timeout_;
    if (one_works && (late || dead)) lose(*rail, late ? "it could not be connected" : "nothing comes back over it");
  }
}

// If a wire was idle at a check, it may have been cut since the previous check. The kernel sends a probe after an
// eighth of the time-out without traffic, and checks are a sixteenth apart. Therefore a cut wire shows three quarters
// of the time-out as silence before the whole time-out has passed.
void TcpLink::watch_wire() {
  if (broken_ || !begun_) return;
  const auto patience = wire_timeout_ - wire_timeout_ / 4;
  size_t up = 0;
  size_t silent = 0;
  for (const auto& rail : rails_) {
    if (!rail->is_up()) continue;
    ++up;
    if (rail->silence(rail->last_wire_look, wire_timeout_ / 8) >= patience) ++silent;
  }
  // Frames that were dealt to a silent connection cannot arrive over another one.
  if (silent > 0 && (deals_ || silent == up)) {
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(patience).count();
    break_off(LossKind::cut_off, "for " + std::to_string(seconds) + " s");
  }
}

bool TcpLink::needs_watching() const {
  if (!keeps() || broken_) return false;
  return std::any_of(rails_.begin(), rails_.end(), [](const auto& rail) {
    return rail->is_up() ? rail->holds_unacknowledged() : rail->is_pending();
  }) || !losses_.empty();
}

std::vector<RailLoss> TcpLink::take_losses() {
  if (losses_.empty() || Clock::now() - losses_.front().when < kEndOfAPeer) return {};
  return std::exchange(losses_, {});
}

uint64_t TcpLink::goodput() const {
  uint64_t sum = 0;
  for (const auto& rail : rails_) sum += rail->goodput();
  return sum;
}

std::vector<RailStatus> TcpLink::rails() const {
  std::vector<RailStatus> found;
  if (deals_) {  // the connections are one rail
    RailStatus all{peer_, 0, true, 0, 0};
    for (const auto& rail : rails_) {
      const auto health = rail->health();
      all.is_up &= rail->is_up();
      all.acknowledged += health.acknowledged;
      all.busy_s = std::max(all.busy_s, health.busy_s);
    }
    return {all};
  }
  for (const auto& rail : rails_) {
    const auto health = rail->health();
    found.push_back({peer_, rail->index(), rail->is_up(), health.acknowledged, health.busy_s});
  }
  return found;
}

// ---- out -----------------------------------------------------------------------------------

void TcpLink::send(const Frame& frame) {
  Outgoing outgoing;
  outgoing.packet.frame = frame;
  if (frame.kind == FrameKind::lost) {
    send_everywhere(std::move(outgoing));
  } else {
    send_numbered(std::move(outgoing));
  }
}

void TcpLink::send_note(const Frame& frame, std::span<const std::byte> payload) {
  Outgoing outgoing;
  outgoing.packet.frame = frame;
  outgoing.packet.frame.length = payload.size();
  outgoing.kept = pool_->take(payload.size());
  std::memcpy(outgoing.kept.get(), payload.data(), payload.size());
  outgoing.payload = outgoing.kept.get();
  send_numbered(std::move(outgoing));
}

void TcpLink::send_numbered(Outgoing outgoing) {
  if (broken_) return;
  outgoing.packet.number = ++numbered_out_;
  Rail* rail = begun_ ? first_up() : nullptr;
  if (rail == nullptr) {
    held_.push_back(std::move(outgoing));
    return;
  }
  rail->push_urgent(std::move(outgoing));
  pump(*rail);
}

// Sends a loss report on every rail, behind the payload that was queued earlier.
void TcpLink::send_everywhere(Outgoing outgoing) {
  if (broken_) return;
  if (!begun_) {
    held_.push_back(std::move(outgoing));
    return;
  }
  for (const auto& rail : rails_) {
    if (!rail->is_up()) continue;
    rail->push(outgoing);
    pump(*rail);
  }
}

Rail& TcpLink::carrier_of(OutStream& stream) {
  if (stream.carrier == OutStream::kNoCarrier) {
    const auto wanted = static_cast<uint16_t>(stream.rail % rails_.size());
    stream.carrier = rails_[wanted]->is_up() ? wanted : first_up()->index();
  }
  return *rails_[stream.carrier];
}

bool TcpLink::refill(Rail& rail) {
  bool any = false;
  for (auto& [key, stream] : out_) {
    while (!stream.pending.empty() && rail.queued_data() < kQueuedFrames && stream.sent < stream.credit &&
           (deals_ || &carrier_of(stream) == &rail)) {
      rail.push(next_of(key, stream));
      any = true;
    }
    if (rail.queued_data() >= kQueuedFrames) break;
  }
  return any;
}

Outgoing TcpLink::next_of(const StreamKey& key, OutStream& stream) {
  auto& piece = stream.pending.front();
  // Multiples of 64 bytes except at the end of an offer, so that no element is split.
  const size_t size = std::min({piece.size, PayloadPool::kBytes, static_cast<size_t>(stream.credit - stream.sent)});
  Outgoing outgoing;
  outgoing.packet.frame = {.group = key.operation.group, .sequence = key.operation.sequence, .kind = FrameKind::data,
                           .channel = key.channel, .offset = stream.sent, .length = size};
  outgoing.payload = piece.data;
  if (keeps()) {
    outgoing.kept = pool_->take(size);
    std::memcpy(outgoing.kept.get(), piece.data, size);
    outgoing.payload = outgoing.kept.get();
    stream.taken += size;
  } else {
    outgoing.stream = &stream;
  }
  stream.sent += size;
  piece.data += size;
  piece.size -= size;
  if (piece.size == 0) stream.pending.pop_front();
  return outgoing;
}

bool TcpLink::pump(Rail& rail) {
  bool any = false;
  for (bool more = true; more && rail.is_open() && !rail.is_blocked();) {
    more = rail.is_up() && refill(rail);
    if (rail.leaves_to_thread()) return any;
    any |= rail.flush() || more;
  }
  rail.watch_writes();
  return any;
}

bool TcpLink::carry(uint16_t index) {
  if (!begun_ || broken_) return false;
  Rail& rail = *rails_[index];
  bool any = false;
  bool more = true;
  for (int turn = 0; more && turn < kWritesATurn && rail.is_open() && !rail.is_blocked(); ++turn) {
    more = rail.is_up() && refill(rail);
    more |= rail.flush(true);
    any |= more;
  }
  rail.watch_writes();
  return any;
}

bool TcpLink::pump() {
  if (!begun_) return false;
  bool any = false;
  for (const auto& rail : rails_) any |= pump(*rail);
  return any;
}

void TcpLink::on_writable(Rail& rail) {
  rail.unblock();
  pump(rail);
}

// ---- in ------------------------------------------------------------------------------------

// Frames that are missing on this rail have arrived over rails that the sender abandoned. Reads these frames there.
// Returns false if this rail has broken.
bool TcpLink::catch_up(const Rail& rail) {
  if (deals_) return rail.is_open();
  for (const auto& other : rails_) {
    if (other.get() != &rail) other->receive_all();
  }
  return rail.is_open();
}

bool TcpLink::place(Rail& rail, const Frame& frame, Place& place) {
  const StreamKey key{frame.key(), frame.channel};
  if (frame.kind == FrameKind::round || frame.kind == FrameKind::control) {
    place.wanted = true;
  } else if (events_.expects(frame.key())) {  // otherwise the operation failed here, so its bytes are not needed
    InStream& stream = in(key);
    if (deals_ && !fits(frame, stream)) {
      break_off(LossKind::died, "it sent bytes of a stream twice, or more than it may");
      return false;
    }
    if (!deals_ && frame.offset > stream.arrived && catch_up(rail) && frame.offset > stream.arrived) {
      rail.break_off("it sent a stream's bytes out of order");
      return false;
    }
    if (!rail.is_open()) return false;
    if (deals_ || frame.offset == stream.arrived) {
      for (const auto& other : rails_) {
        if (!deals_ && other.get() != &rail) other->abandon(key, *pool_);
      }
      place.wanted = true;
      if (stream.landing != nullptr && frame.offset >= stream.landing_from &&
          frame.offset + frame.length <= stream.landing_to) {
        place.at = stream.landing + (frame.offset - stream.landing_from);
        return true;
      }
    }
  }
  place.owned = pool_->take(frame.length);
  place.at = place.owned.get();
  return true;
}

void TcpLink::on_packet(Rail& rail, const Packet& packet, Place place) {
  if (packet.frame.kind == FrameKind::data) {
    if (place.wanted) on_arrival(packet.frame, std::move(place));
    return;
  }
  if (packet.number != 0) {
    if (packet.number > numbered_in_ + 1 && !catch_up(rail)) return;
    if (packet.number <= numbered_in_) return;  // a duplicate: it has also arrived over an abandoned rail
    if (packet.number != numbered_in_ + 1) {
      rail.break_off("it sent frames out of order");
      return;
    }
    ++numbered_in_;
  }
  on_control(rail, packet, {place.at, payload_of(packet.frame)});
}

void TcpLink::on_arrival(const Frame& frame, Place place) {
  InStream& stream = in({frame.key(), frame.channel});
  InStream::Piece piece{place.at, frame.length, frame.length, kNoSlot, std::move(place.owned)};
  if (frame.offset != stream.arrived) {
    const bool is_new = frame.offset > stream.arrived && stream.ahead.emplace(frame.offset, std::move(piece)).second;
    if (!is_new) break_off(LossKind::died, "it sent bytes of a stream twice");
    return;
  }
  stream.arrived += frame.length;
  stream.pieces.push_back(std::move(piece));
  for (auto next = stream.ahead.begin(); next != stream.ahead.end() && next->first <= stream.arrived;
       next = stream.ahead.erase(next)) {
    if (next->first < stream.arrived) {
      break_off(LossKind::died, "it sent bytes of a stream twice");
      return;
    }
    stream.arrived += next->second.size;
    stream.pieces.push_back(std::move(next->second));
  }
}

// The bytes of a stream beyond what has arrived are bounded by the credit that the sender has.
bool TcpLink::fits(const Frame& frame, const InStream& stream) const {
  return frame.offset >= stream.arrived && frame.offset - stream.arrived + frame.length <= kWindow;
}

void TcpLink::on_control(Rail& rail, const Packet& packet, std::span<const std::byte> payload) {
  const Frame& frame = packet.frame;
  if (frame.kind == FrameKind::taken) {
    const auto found = out_.find({frame.key(), frame.channel});
    if (found == out_.end()) return;
    found->second.credit += frame.length;
    pump();
    return;
  }
  if (frame.kind == FrameKind::rail) {
    if (deals_ || frame.offset >= rails_.size()) return;
    Rail& silent = *rails_[frame.offset];
    const bool in_use = silent.is_up() || silent.is_pending();
    if (in_use && &silent != &rail) lose(silent, "the peer reported that nothing comes back over it");
    return;
  }
  if (frame.kind == FrameKind::lost && frame.offset == static_cast<uint64_t>(peer_)) {
    // Payload that was sent earlier may still be in transit on the other rails.
    rail.has_left = true;
    if (std::any_of(rails_.begin(), rails_.end(), [](const auto& r) { return r->is_up() && !r->has_left; })) return;
  }
  events_.on_frame(peer_, frame, payload);
}

size_t TcpLink::copy(InStream& stream, std::byte* target, size_t most) {
  if (stream.pieces.empty()) {
    stream.landing = target;
    stream.landing_from = stream.arrived;
    stream.landing_to = stream.arrived + most;
    return 0;
  }
  const auto bytes = peek(stream, most);
  if (bytes.data() != target) std::memcpy(target, bytes.data(), bytes.size());
  return bytes.size();
}

void TcpLink::consume(const StreamKey& key, InStream& stream, size_t size) {
  auto& piece = stream.pieces.front();
  piece.data += size;
  piece.size -= size;
  stream.ungranted += size;
  if (piece.size == 0) stream.pieces.pop_front();
  if (stream.ungranted < kWindow / 4) return;
  send({.group = key.operation.group, .sequence = key.operation.sequence, .kind = FrameKind::taken,
        .channel = key.channel, .length = std::exchange(stream.ungranted, 0)});
}

void TcpLink::close(const OperationKey& key) {
  for (const auto& rail : rails_) rail->close_operation(key, *pool_);
  Link::close(key);
}

}  // namespace multiring
