// Exchanges segments, and the data for ringing doorbells, between the ranks of one host.
//
// A rank connects to the higher ranks from the thread that joins the job (`map_from`). Its progress thread answers the
// lower ranks. RankState::mutex guards the state. `map_from` waits for its peer and locks the mutex itself; all other
// callers hold the mutex.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "failure_detector.h"
#include "memory/clock.h"
#include "memory/digest.h"
#include "peers.h"
#include "rank_state.h"

namespace multiring {

// The message that accompanies a segment. `proof` shows that the sender knows the job's secret.
struct Greeting {
  int32_t rank = -1;
  uint32_t keep = 0;  // 1: keep the connection, because its end reveals the peer's death
  Sha256 proof{};
  uint64_t witness_address = 0;  // a word in the sender's ordinary memory; the receiver tries to read it
  uint64_t witness = 0;          // the value of that word
};

class SegmentHandover {
 public:
  SegmentHandover(RankState& state, Peers& peers, FailureDetector& detector, LinkEvents& events);

  const std::string& name() const { return name_; }  // the name of the abstract socket
  void open();   // starts to accept lower ranks; call it when their addresses are known
  void close();  // stops to accept; call it when all ranks of the host are connected
  // Exchanges segments with a higher rank. `keeps`: keeps the connection and watches it. Returns false if `interrupted`
  // returned true. Throws FaultKind::rendezvous.
  bool map_from(const PeerAddress& peer, bool keeps, Clock::time_point deadline,
                const std::function<bool()>& interrupted);
  void drop_pending() { pending_.clear(); }
  void drop() {  // closes socket and doorbell; call it when no link needs the doorbell any more
    socket_.reset();
    doorbell_.reset();
  }

 private:
  void listen();
  void on_ready();
  void on_pending(int fd);
  Sha256 proof_of(int from, int to) const;
  Doorbell::Word doorbell_word_of(int rank) const;  // the secret word that the rank's doorbell accepts
  Greeting greeting_to(int peer) const;
  void adopt_memory(const Descriptor& memory, const Greeting& theirs, int pid);

  RankState& state_;
  Peers& peers_;
  FailureDetector& detector_;
  LinkEvents& events_;
  const std::string name_;
  uint64_t witness_ = 0;  // a random value; peers read it to test whether they can read this process
  std::unique_ptr<Doorbell> doorbell_;
  const std::shared_ptr<ShmBuffers> buffers_ = std::make_shared<ShmBuffers>();
  Descriptor socket_;
  std::map<int, Descriptor> pending_;  // accepted sockets without a greeting so far, by descriptor
};

}  // namespace multiring
