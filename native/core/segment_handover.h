// How ranks of one host get at each other's segments, and at the doorbells that wake them.
//
// Guarded by RankState::mutex, but for `map_from`, which takes it itself: it waits for its peer. The caller that joins
// the job goes to the higher ranks; the progress thread answers the lower ones.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "clock.h"
#include "digest.h"
#include "failure_detector.h"
#include "peers.h"
#include "rank_state.h"

namespace multiring {

// What a rank says when it hands over its segment; `proof` shows that it knows the job's secret.
struct Greeting {
  int32_t rank = -1;
  uint32_t keep = 0;  // the connection stays, so that its end tells of the other's death
  Sha256 proof{};
  uint64_t witness_address = 0;  // a word of the rank's own memory, to try whether it can be read
  uint64_t witness = 0;
};

class SegmentHandover {
 public:
  SegmentHandover(RankState& state, Peers& peers, FailureDetector& detector, LinkEvents& events);

  const std::string& name() const { return name_; }  // of the abstract socket
  void open();   // lower ranks may come: their addresses are known
  void close();  // all ranks of the host have come
  // Exchanges segments with a higher rank; `keeps`: and watches it. False if it was interrupted. FaultKind::rendezvous.
  bool map_from(const PeerAddress& peer, bool keeps, Clock::time_point deadline,
                const std::function<bool()>& interrupted);
  void drop_pending() { pending_.clear(); }
  void drop() {  // once no link needs the doorbell any more
    socket_.reset();
    doorbell_.reset();
  }

 private:
  void listen();
  void on_ready();
  void on_pending(int fd);
  Sha256 proof_of(int from, int to) const;
  Doorbell::Word doorbell_word_of(int rank) const;  // what a rank is to be rung with
  Greeting greeting_to(int peer) const;
  void adopt_memory(const Descriptor& memory, const Greeting& theirs, int pid);

  RankState& state_;
  Peers& peers_;
  FailureDetector& detector_;
  LinkEvents& events_;
  const std::string name_;
  uint64_t witness_ = 0;  // random; peers read it to learn whether they can read this process
  std::unique_ptr<Doorbell> doorbell_;
  const std::shared_ptr<ShmBuffers> buffers_ = std::make_shared<ShmBuffers>();
  Descriptor socket_;
  std::map<int, Descriptor> pending_;  // accepted sockets that have said nothing yet
};

}  // namespace multiring
