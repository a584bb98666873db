// Mutual proof, on a fresh tcp connection, that both ends know the job's secret.
//
// The connecting rank says hello with a nonce; the other answers with its own nonce and an HMAC
// over both; the first proves itself likewise. Nothing else is read before: a stranger gets at most
// a fixed number of bytes and seconds of attention. Frames after it are not encrypted.
#pragma once

#include <cstdint>
#include <string>

#include "descriptor.h"
#include "operation.h"

namespace multiring {

class Handshake {
 public:
  enum class Status : uint8_t { going, done, refused };
  struct Self {
    int rank;
    int size;
    std::string job;
    std::string secret;
    uint16_t rails = 1;  // how many every rank has
    uint16_t rail = 0;   // caller: which of them this connection is to be
  };
  static constexpr int kAnyone = -1;

  // `peer` is the rank that is called, or kAnyone for an accepted connection.
  Handshake(Descriptor socket, const Self& self, int peer, Clock::time_point deadline);

  Status advance();  // as far as the socket lets it; never blocks
  bool wants_to_write() const { return !outgoing_.empty(); }
  int peer() const { return peer_; }
  uint16_t rail() const { return rail_; }
  int fd() const { return socket_.get(); }
  const std::string& why() const { return why_; }
  Clock::time_point deadline() const { return deadline_; }
  Descriptor release() { return std::move(socket_); }

 private:
  Status refuse(const std::string& why);
  bool flush();
  bool fill(size_t want);
  std::string proof(const std::string& role) const;
  Status on_hello();
  Status on_answer();
  Status on_proof();

  Descriptor socket_;
  const Self self_;
  int peer_;
  uint16_t rail_;
  const bool calls_;
  const Clock::time_point deadline_;
  bool heard_first_ = false;
  std::string own_nonce_;
  std::string their_nonce_;
  std::string outgoing_;
  std::string incoming_;
  std::string why_;
};

}  // namespace multiring
