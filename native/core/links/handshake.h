// Mutual authentication on a fresh TCP connection: both ends prove that they know the job's secret.
//
// The calling rank sends a hello with a nonce. The called rank answers with its own nonce and an HMAC over both nonces.
// The caller proves itself in the same way and receives a welcome. Before that, the called rank reads a fixed number of
// bytes and waits a fixed number of seconds at most. If a connection ends before the welcome, the called rank had too
// many pending handshakes; the caller may try again.
//
// If the job seals its connections, both ends also send the offer of a key exchange, which the HMACs cover. A rank that
// seals and a rank that does not reject each other.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "memory/clock.h"
#include "memory/descriptor.h"
#include "sealed_stream.h"

namespace multiring {

class Handshake {
 public:
  enum class Status : uint8_t { going, done, refused };
  struct Self {
    int rank;
    int size;
    std::string job;
    std::string secret;
    uint16_t rails = 1;  // number of rails, equal on all ranks
    uint16_t rail = 0;   // caller: index of the rail that this connection becomes
    bool seals = false;  // encrypt the connection after the handshake; equal on all ranks
  };
  static constexpr int kAnyone = -1;

  // `peer`: the called rank, or kAnyone for an accepted connection.
  Handshake(Descriptor socket, const Self& self, int peer, Clock::time_point deadline);

  Status advance();  // continues as far as possible without blocking
  bool wants_to_write() const { return !outgoing_.empty(); }
  int peer() const { return peer_; }
  uint16_t rail() const { return rail_; }
  int fd() const { return socket_.get(); }
  const std::string& why() const { return why_; }
  bool was_turned_away() const { return turned_away_; }  // the peer closed the connection; a new attempt may succeed
  Clock::time_point deadline() const { return deadline_; }
  Descriptor release() { return std::move(socket_); }
  // The stream for the connection's bytes after a successful handshake; null if the job does not seal.
  std::unique_ptr<SealedStream> release_stream() { return std::move(stream_); }

 private:
  enum class Stage : uint8_t { hello, answer, proof, welcome };  // the message that this end waits for

  Status refuse(const std::string& why);
  Status broke(const std::string& why);
  size_t awaited() const;
  bool flush();
  bool fill(size_t want);
  std::string transcript() const;
  std::string proof(const std::string& role) const;
  size_t offer_bytes() const { return self_.seals ? KeyExchange::kOfferBytes : 0; }
  std::string own_offer();
  void start_stream();
  Status on_hello();
  Status on_answer();
  Status on_proof();
  Status on_welcome();

  Descriptor socket_;
  const Self self_;
  int peer_;
  uint16_t rail_;
  const bool calls_;
  const Clock::time_point deadline_;
  Stage stage_;
  bool turned_away_ = false;
  std::string own_nonce_;
  std::string their_nonce_;
  std::unique_ptr<KeyExchange> exchange_;
  std::string their_offer_;
  std::unique_ptr<SealedStream> stream_;
  std::string outgoing_;
  std::string incoming_;
  std::string why_;
};

}  // namespace multiring
