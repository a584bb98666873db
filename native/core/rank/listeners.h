// The sockets that accept connections from ranks of other hosts, and the handshakes that are pending on them.
//
// RankState::mutex guards the state. `listen` locks the mutex itself; callers of all other functions hold it. The
// progress thread accepts connections and advances handshakes; the thread that joins the job listens.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "links/handshake.h"
#include "memory/clock.h"
#include "rank_state.h"

namespace multiring {

class Listeners {
 public:
  // `on_proven` is called with each completed handshake, and may take the connection out of the handshake.
  Listeners(RankState& state, std::function<void(Handshake&)> on_proven)
      : state_(state), on_proven_(std::move(on_proven)) {}

  // Listens at a free port in the range and returns it. Every call adds a rail.
  uint16_t listen(const std::string& host, uint16_t first_port, uint16_t last_port);
  void open() {  // starts to accept connections
    for (const auto& listener : listeners_) watch(listener);
  }
  size_t size() const { return listeners_.size(); }
  const std::string& host(size_t rail) const { return listeners_[rail].host; }
  Handshake::Self self_on(uint16_t rail) const;  // this rank's identity for a handshake on `rail`

  bool rests() const { return listens_again_.has_value(); }  // true during a pause, so that `tend` must be called
  bool waits_for_time() const { return rests() || !pending_handshakes_.empty(); }
  void tend() {
    if (listens_again_ && Clock::now() >= *listens_again_) listen_again();
  }
  void expire_pending();  // drops handshakes that take too long
  void drop_pending() { pending_handshakes_.clear(); }
  void close() { listeners_.clear(); }

 private:
  struct ListeningSocket {
    std::string host;
    Descriptor socket;
  };
  void watch(const ListeningSocket& listener);
  void on_caller(const Descriptor& listener);
  bool make_room_for_caller();
  void on_handshake(int fd);
  void drop_pending(int fd);
  void rest_listeners(Clock::duration pause);
  void listen_again();

  RankState& state_;
  const std::function<void(Handshake&)> on_proven_;
  std::vector<ListeningSocket> listeners_;  // by rail
  std::optional<Clock::time_point> listens_again_;  // end of a pause; callers wait in the kernel's queue until then
  std::map<int, std::unique_ptr<Handshake>> pending_handshakes_;
};

}  // namespace multiring
