// Mutual proof, on a fresh tcp connection, that both ends know the job's secret.
//
// The connecting rank says hello with a nonce; the other answers with its own nonce and an HMAC
// over both; the first proves itself likewise, and is bid welcome. Nothing else is read before: a
// caller gets at most a fixed number of bytes and seconds of attention. Frames after it are not
// encrypted. A caller whose connection ends before the welcome was turned away, by whoever had too
// many callers at the door, and may come again.
#pragma once

#include <cstdint>
#include <string>

#include "clock.h"
#include "descriptor.h"

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
  bool was_turned_away() const { return turned_away_; }  // refused, and nothing was wrong with what was said
  Clock::time_point deadline() const { return deadline_; }
  Descriptor release() { return std::move(socket_); }

 private:
  enum class Stage : uint8_t { hello, answer, proof, welcome };  // what is awaited

  Status refuse(const std::string& why);
  Status broke(const std::string& why);
  size_t awaited() const;
  bool flush();
  bool fill(size_t want);
  std::string proof(const std::string& role) const;
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
  std::string outgoing_;
  std::string incoming_;
  std::string why_;
};

}  // namespace multiring
