// One rank's end of a communicator, and the order of the operations of a device.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "board.h"

namespace standin {

enum Result : int {
  kSuccess = 0,
  kCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};

struct Message {
  void* memory;
  size_t bytes;
  int peer;
  bool is_outgoing;
};

class Communicator {
 public:
  Communicator(int rank, int ranks, int device, bool is_blocking)
      : rank_(rank), ranks_(ranks), device_(device), is_blocking_(is_blocking) {}

  // Waits for the other ranks. Returns a Result.
  int join(const BoardId& id);
  int split(int color, int key, std::shared_ptr<Communicator>* made, bool is_blocking);

  using Use = std::function<void(const std::vector<char*>& slots)>;
  // Runs one collective, on a stream's thread: shows this rank's operand, and uses those of all ranks.
  void run(const std::string& call, uint64_t number, const void* shown, size_t bytes, const Use& use);
  void run(std::vector<Message> messages);

  // Shows the other ranks that the device was given operation `number` of this communicator, from 1 on.
  void show(uint64_t number, const std::map<uint64_t, uint64_t>& before);

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  int device() const { return device_; }
  bool is_blocking() const { return is_blocking_; }
  uint64_t id() const { return board_ == nullptr ? 0 : board_->nonce(); }
  bool is_aborted() const { return is_aborted_; }
  void abort() { is_aborted_ = true; }
  int state();                                  // the asynchronous error, or kInProgress
  void set_state(int state) { state_ = state; }
  static void write_late(int us) { late_us_ = us; }
  void fail_after(int operations, int state) { fails_with_ = state, fails_after_ = operations; }
  std::string text() const;
  void set_text(const std::string& text);

  std::map<int, double> factors;  // of the reductions that the program has made
  int next_op = 5;
  std::atomic<int> running{0};  // operations that have not ended

 private:
  bool until(const std::function<bool()>& is_reached);
  bool meet(uint64_t number = 0);
  std::string wrong_order(uint64_t number) const;
  void fail(int state, const std::string& text);
  void look_for_dead_ranks();

  static std::atomic<int> late_us_;  // how long an operation takes between its last look for an abort and its result
  const int rank_;
  const int ranks_;
  const int device_;
  const bool is_blocking_;
  std::shared_ptr<Board> board_;
  std::atomic<bool> is_aborted_{false};
  std::atomic<int> state_{kInProgress};
  std::atomic<int> fails_after_{-1};
  std::atomic<int> fails_with_{kSystemError};
  uint64_t steps_ = 0;
  mutable std::mutex text_mutex_;
  std::string text_;
};
using CommunicatorPointer = std::shared_ptr<Communicator>;

// Adds a line to the reports that tests read, and to standard error.
void report(const std::string& line);
std::string reports();

// Puts operations of communicators on streams. A device does them one after the other in the order in which it was given
// them, as a device may. Two ranks that give their devices operations of two communicators in different orders would
// wait for each other forever.
class DeviceOrder {
 public:
  static DeviceOrder& of(int device);
  void know(uint64_t communicator);  // counts the operations of the communicator from now on
  void forget(uint64_t communicator);
  using Operation = std::function<void(uint64_t number)>;
  // Returns the work of the operation. Its place in the order is taken now.
  std::function<void()> place(const CommunicatorPointer& communicator, const Operation& operation);

 private:
  void end(uint64_t number);

  std::mutex mutex_;
  std::map<uint64_t, uint64_t> given_;  // operations by communicator
  uint64_t next_ = 0;
  std::atomic<uint64_t> ended_{0};
  std::map<uint64_t, bool> ended_early_;
};

}  // namespace standin
