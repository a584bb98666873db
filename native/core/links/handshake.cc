#include "handshake.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "memory/digest.h"
#include "memory/fault.h"

namespace multiring {
namespace {

constexpr char kMagic[9] = "MULTIRNG";
constexpr uint32_t kProtocol = 3;
constexpr uint32_t kSealedProtocol = 4;
constexpr char kWelcome = 'W';
constexpr size_t kNonce = 16;
constexpr size_t kProof = 32;
constexpr size_t kHello = 8 + 4 + 4 + 4 + 4 + kNonce;  // magic, protocol, caller's rank, called rank, rail, nonce

void put(std::string& to, uint32_t value) { to.append(reinterpret_cast<const char*>(&value), sizeof value); }

uint32_t get(const std::string& from, size_t at) {
  uint32_t value = 0;
  std::memcpy(&value, from.data() + at, sizeof value);
  return value;
}

bool same(const std::string& got, const std::string& want) {
  Sha256 a{};
  Sha256 b{};
  std::memcpy(a.data(), got.data(), kProof);
  std::memcpy(b.data(), want.data(), kProof);
  return equal_in_constant_time(a, b);
}

}  // namespace

Handshake::Handshake(Descriptor socket, const Self& self, int peer, Clock::time_point deadline)
    : socket_(std::move(socket)), self_(self), peer_(peer), rail_(self.rail), calls_(peer != kAnyone),
      deadline_(deadline), stage_(calls_ ? Stage::answer : Stage::hello) {
  const auto nonce = random_nonce();
  own_nonce_.assign(reinterpret_cast<const char*>(nonce.data()), nonce.size());
  if (!calls_) return;
  outgoing_.append(kMagic, 8);
  put(outgoing_, self_.seals ? kSealedProtocol : kProtocol);
  put(outgoing_, static_cast<uint32_t>(self_.rank));
  put(outgoing_, static_cast<uint32_t>(peer_));
  put(outgoing_, rail_);
  outgoing_ += own_nonce_ + own_offer();
}

Handshake::Status Handshake::refuse(const std::string& why) {
  why_ = why;
  socket_.reset();
  return Status::refused;
}

// Called if the connection breaks. If the peer or its kernel closed it, the peer turned this rank away. A connection
// that was never established does not count as turned away.
Handshake::Status Handshake::broke(const std::string& why) {
  turned_away_ = errno == 0 || errno == ECONNRESET || errno == EPIPE;
  return refuse(why);
}

size_t Handshake::awaited() const {
  switch (stage_) {
    case Stage::hello:  // the protocol is checked before the offer is awaited, which an unsealed caller does not send
      return incoming_.size() < kHello ? kHello : kHello + offer_bytes();
    case Stage::answer:
      return kNonce + offer_bytes() + kProof;
    case Stage::proof:
      return kProof;
    case Stage::welcome:
      break;
  }
  return sizeof kWelcome;
}

// An offer is drawn only when it is sent, because a key costs more than all other parts of a stranger's handshake.
std::string Handshake::own_offer() {
  if (!self_.seals) return {};
  exchange_ = std::make_unique<KeyExchange>();
  return exchange_->offer();
}

void Handshake::start_stream() {
  if (!self_.seals) return;
  stream_ = std::make_unique<SealedStream>(exchange_->seals(their_offer_, self_.secret, transcript(), calls_));
  exchange_.reset();
}

// Everything that the two ends must agree on. The parts after the rail have fixed lengths.
std::string Handshake::transcript() const {
  const int caller = calls_ ? self_.rank : peer_;
  const int called = calls_ ? peer_ : self_.rank;
  std::string text = self_.job + "|" + std::to_string(caller) + "|" + std::to_string(called) + "|" +
                     std::to_string(rail_) + "|";
  text += calls_ ? own_nonce_ + their_nonce_ : their_nonce_ + own_nonce_;
  if (!self_.seals) return text;
  return text + (calls_ ? exchange_->offer() + their_offer_ : their_offer_ + exchange_->offer());
}

std::string Handshake::proof(const std::string& role) const {
  const Sha256 mac = hmac_sha256(self_.secret, (self_.seals ? "sealed " : "") + role + "|" + transcript());
  return {reinterpret_cast<const char*>(mac.data()), mac.size()};
}

bool Handshake::flush() {
  while (!outgoing_.empty()) {
    const ssize_t sent = ::send(socket_.get(), outgoing_.data(), outgoing_.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (errno == EAGAIN || errno == EINTR || errno == ENOTCONN || errno == EINPROGRESS) return true;
      return false;
    }
    outgoing_.erase(0, static_cast<size_t>(sent));
  }
  return true;
}

// Reads until there are `want` bytes in all, and never more, because the following bytes belong to the link.
bool Handshake::fill(size_t want) {
  while (incoming_.size() < want) {
    char buffer[128];
    const ssize_t got = ::recv(socket_.get(), buffer, std::min(sizeof buffer, want - incoming_.size()), MSG_DONTWAIT);
    if (got == 0) {
      errno = 0;
      return false;
    }
    if (got < 0) return errno == EAGAIN || errno == EINTR || errno == ENOTCONN;
    incoming_.append(buffer, static_cast<size_t>(got));
  }
  return true;
}

Handshake::Status Handshake::advance() {
  if (!flush()) return broke("the connection broke during the handshake");
  const size_t want = awaited();
  if (!fill(want)) return broke("the peer closed the connection during the handshake");
  if (incoming_.size() < want) return Status::going;
  switch (stage_) {
    case Stage::hello:
      return on_hello();
    case Stage::answer:
      return on_answer();
    case Stage::proof:
      return on_proof();
    case Stage::welcome:
      break;
  }
  return on_welcome();
}

Handshake::Status Handshake::on_hello() {
  if (incoming_.compare(0, 8, kMagic, 8) != 0) return refuse("not a multiring rank");
  const uint32_t protocol = get(incoming_, 8);
  if (protocol != kProtocol && protocol != kSealedProtocol) return refuse("another version of multiring's protocol");
  if ((protocol == kSealedProtocol) != self_.seals) {
    return refuse("MULTIRING_SEAL differs between the ranks; set it to the same value on all of them");
  }
  const uint32_t caller = get(incoming_, 12);
  if (caller >= static_cast<uint32_t>(self_.size) || get(incoming_, 16) != static_cast<uint32_t>(self_.rank)) {
    return refuse("a rank outside this job");
  }
  if (get(incoming_, 20) >= self_.rails) return refuse("a rail that does not exist");
  if (incoming_.size() < kHello + offer_bytes()) return advance();
  peer_ = static_cast<int>(caller);
  rail_ = static_cast<uint16_t>(get(incoming_, 20));
  their_nonce_ = incoming_.substr(24, kNonce);
  their_offer_ = incoming_.substr(kHello);
  incoming_.clear();
  stage_ = Stage::proof;
  try {
    const std::string offer = own_offer();
    outgoing_ = own_nonce_ + offer + proof("called");
  } catch (const Fault& fault) {
    return refuse(fault.what());
  }
  return advance();
}

Handshake::Status Handshake::on_answer() {
  their_nonce_ = incoming_.substr(0, kNonce);
  their_offer_ = incoming_.substr(kNonce, offer_bytes());
  if (!same(incoming_.substr(kNonce + offer_bytes()), proof("called"))) return refuse("the peer has another secret");
  incoming_.clear();
  stage_ = Stage::welcome;
  outgoing_ = proof("caller");
  try {
    start_stream();
  } catch (const Fault& fault) {
    return refuse(fault.what());
  }
  return advance();
}

Handshake::Status Handshake::on_proof() {
  if (!same(incoming_, proof("caller"))) return refuse("the caller has another secret");
  try {
    start_stream();
  } catch (const Fault& fault) {
    return refuse(fault.what());
  }
  outgoing_ = kWelcome;
  // One byte always fits into the send buffer of a fresh connection.
  if (!flush() || !outgoing_.empty()) return broke("the connection broke during the handshake");
  return Status::done;
}

Handshake::Status Handshake::on_welcome() {
  return incoming_.front() == kWelcome ? Status::done : refuse("the peer has another version of multiring's protocol");
}

}  // namespace multiring
