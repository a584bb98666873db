// Where ranks of other hosts call, and who has called and not yet proven itself.
//
// Guarded by RankState::mutex, which `listen` takes itself and every other caller holds: the progress thread accepts
// and hears pending handshakes, a caller listens and joins.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "clock.h"
#include "handshake.h"
#include "rank_state.h"

namespace multiring {

class Listeners {
 public:
  // `on_proven` is told of each rank that has called, and takes its connection if it wants it.
  Listeners(RankState& state, std::function<void(Handshake&)> on_proven)
      : state_(state), on_proven_(std::move(on_proven)) {}

  // Every call makes one more rail. The port.
  uint16_t listen(const std::string& host, uint16_t first_port, uint16_t last_port);
  void open() {  // ranks may call
    for (const auto& listener : listeners_) watch(listener);
  }
  size_t size() const { return listeners_.size(); }
  const std::string& host(size_t rail) const { return listeners_[rail].host; }
  Handshake::Self self_on(uint16_t rail) const;  // what this rank says of itself

  bool rests() const { return listens_again_.has_value(); }  // somebody has to call `tend`
  bool waits_for_time() const { return rests() || !pending_handshakes_.empty(); }
  void tend() {
    if (listens_again_ && Clock::now() >= *listens_again_) listen_again();
  }
  void expire_pending();  // handshakes that take too long
  void drop_pending() { pending_handshakes_.clear(); }
  void close() { listeners_.clear(); }

 private:
  struct Listener {
    std::string host;
    Descriptor socket;
  };
  void watch(const Listener& listener);
  void on_caller(const Descriptor& listener);
  bool make_room_for_caller();
  void on_handshake(int fd);
  void drop_pending(int fd);
  void rest_listeners(Clock::duration pause);
  void listen_again();

  RankState& state_;
  const std::function<void(Handshake&)> on_proven_;
  std::vector<Listener> listeners_;                 // by rail
  std::optional<Clock::time_point> listens_again_;  // who comes until then stays in the kernel's queue
  std::map<int, std::unique_ptr<Handshake>> pending_handshakes_;
};

}  // namespace multiring
