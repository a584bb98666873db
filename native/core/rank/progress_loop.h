// The loops of the driving thread: the progress thread (`run`), or a caller that waits (`wait`).
//
// Each loop locks RankState::mutex itself, and releases it while it sleeps or spins. The progress thread never takes
// Python's lock. Any thread may call `wait`.
#pragma once

#include <array>
#include <memory>
#include <thread>

#include "event_recorder.h"
#include "operation_driver.h"
#include "operation_table.h"
#include "peer_connector.h"
#include "peers.h"
#include "rail_watch.h"
#include "rank_state.h"
#include "sleepers.h"

namespace multiring {

inline constexpr auto kCongestedSleep = std::chrono::milliseconds(1);

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class ProgressLoop {
 public:
  enum class Waited : uint8_t { ended, timed_out, interrupted };

  ProgressLoop(RankState& state, Sleepers& sleepers, Peers& peers, PeerConnector& connector, RailWatch& rails,
               OperationTable& table, OperationDriver& driver, EventRecorder& recorder)
      : state_(state), sleepers_(sleepers), peers_(peers), connector_(connector), rails_(rails), table_(table),
        driver_(driver), recorder_(recorder) {}

  void start() { thread_ = std::make_unique<std::thread>([this] { run(); }); }
  void join() { thread_->join(); }
  void disown() { [[maybe_unused]] const auto* parents = thread_.release(); }  // a forked child has no such thread

  // Waits for an operation, and drives unless another caller does. interrupted: a signal has arrived.
  Waited wait(const std::shared_ptr<Operation>& operation, double timeout_s);

 private:
  void run();
  void look_around();
  int pause_ms(bool callers_rest, bool calls) const;
  bool poll(RankState::Lock& lock, int timeout_ms);
  Waited drive_until(const std::shared_ptr<Operation>& operation, Clock::time_point deadline, RankState::Lock& lock);

  RankState& state_;
  Sleepers& sleepers_;
  Peers& peers_;
  PeerConnector& connector_;
  RailWatch& rails_;
  OperationTable& table_;
  OperationDriver& driver_;
  EventRecorder& recorder_;
  std::array<Poller::Ready, 64> ready_;
  int count_ = 0;         // number of valid entries in ready_
  uint64_t told_of_ = 0;  // number of ended operations when sleeping callers were last woken
  std::unique_ptr<std::thread> thread_;
};

}  // namespace multiring
