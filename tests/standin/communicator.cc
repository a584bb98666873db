#include "communicator.h"

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>

#include "runtime.h"

namespace standin {
namespace {

constexpr auto kPause = std::chrono::microseconds(30);
constexpr int kTurnsBetweenLooks = 200;
constexpr int kDevicesPerHost = 1000;

std::mutex reports_mutex;
std::string all_reports;

// Returns whether the process exists and is no zombie.
bool is_alive(int process) {
  if (::kill(process, 0) != 0) return false;
  std::FILE* file = std::fopen(("/proc/" + std::to_string(process) + "/stat").c_str(), "r");
  if (file == nullptr) return false;
  char text[256] = {};
  const size_t size = std::fread(text, 1, sizeof text - 1, file);
  std::fclose(file);
  const char* state = size == 0 ? nullptr : std::strrchr(text, ')');
  return state != nullptr && state[2] != 'Z' && state[2] != 'X';
}

}  // namespace

std::atomic<int> Communicator::late_us_{0};

void report(const std::string& line) {
  const std::lock_guard lock(reports_mutex);
  all_reports += line + "\n";
  std::fprintf(stderr, "nccl stand-in: %s\n", line.c_str());
}

std::string reports() {
  const std::lock_guard lock(reports_mutex);
  return all_reports;
}

// Waits until `is_reached`. Returns false if the communicator was aborted first.
bool Communicator::until(const std::function<bool()>& is_reached) {
  for (int turn = 1; !is_reached(); ++turn) {
    if (is_aborted_) return false;
    if (turn % kTurnsBetweenLooks == 0) look_for_dead_ranks();
    if (turn < 20) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kPause);
    }
  }
  return true;
}

// The real NCCL does not notice on one host that a process has died. A test can ask for the report.
void Communicator::look_for_dead_ranks() {
  static const bool is_reported = setting("STANDIN_NCCL_REPORTS_DEATH", 0) != 0;
  if (!is_reported || board_ == nullptr || state_ != kSuccess) return;
  for (int each = 0; each < ranks_; ++each) {
    const int process = board_->rank(each).process;
    if (process == 0 || is_alive(process)) continue;
    set_text("rank " + std::to_string(each) + " has ended");
    state_ = kRemoteError;
  }
}

// Waits for all ranks. In operation `number`, reports a wrong order: the ranks would wait for each other forever.
bool Communicator::meet(uint64_t number) {
  const uint64_t step = ++steps_;
  board_->rank(rank_).step = step;
  for (int each = 0; each < ranks_; ++each) {
    std::string wrong;
    const auto is_reached = [&] {
      wrong = wrong_order(number);
      return !wrong.empty() || board_->rank(each).step >= step;
    };
    if (!until(is_reached)) return false;
    if (wrong.empty()) continue;
    report(wrong);
    fail(kInvalidUsage, wrong);
    return false;
  }
  return true;
}

void Communicator::show(uint64_t number, const std::map<uint64_t, uint64_t>& before) {
  Placement& placement = board_->rank(rank_).placements[number % kMostPlaced];
  placement.number = 0;
  int at = 0;
  std::memset(placement.before, 0, sizeof placement.before);
  for (const auto& [communicator, operations] : before)
    if (communicator != id() && at < kMostSeen) placement.before[at++] = {communicator, operations};
  placement.number = number;
}

// Returns what is wrong if another rank's device was given this operation after a different number of operations of
// another communicator; else "".
std::string Communicator::wrong_order(uint64_t number) const {
  if (number == 0) return "";
  const Placement& own = board_->rank(rank_).placements[number % kMostPlaced];
  for (int each = 0; each < ranks_; ++each) {
    const Placement& other = board_->rank(each).placements[number % kMostPlaced];
    if (each == rank_ || own.number != number || other.number != number) continue;
    for (const Count& mine : own.before)
      for (const Count& theirs : other.before)
        if (mine.communicator != 0 && theirs.communicator == mine.communicator &&
            theirs.operations != mine.operations)
          return "wrong order between communicators: before operation " + std::to_string(number) + " of one, rank " +
                 std::to_string(rank_) + " was given " + std::to_string(mine.operations) +
                 " operations of another, rank " + std::to_string(each) + " " + std::to_string(theirs.operations);
  }
  return "";
}

int Communicator::state() {
  look_for_dead_ranks();
  return state_;
}

std::string Communicator::text() const {
  const std::lock_guard lock(text_mutex_);
  return text_;
}

void Communicator::set_text(const std::string& text) {
  const std::lock_guard lock(text_mutex_);
  text_ = text;
}

// Fails late: the operation stays in progress until the communicator is aborted.
void Communicator::fail(int state, const std::string& text) {
  set_text(text);
  state_ = state;
  until([] { return false; });
}

int Communicator::join(const BoardId& id) {
  board_.reset(Board::open(id));
  if (board_ == nullptr) {
    set_text("the process that made the id has ended");
    return kRemoteError;
  }
  RankEntry& own = board_->rank(rank_);
  own.device = device_ + kDevicesPerHost * static_cast<int>(setting("STANDIN_HOST", 0));
  own.process = ::getpid();
  if (!meet()) return kInternalError;
  for (int each = 0; each < ranks_; ++each) {
    if (each == rank_ || board_->rank(each).device != own.device) continue;
    set_text("Duplicate GPU detected : rank " + std::to_string(rank_) + " and rank " + std::to_string(each) +
             " both on CUDA device " + std::to_string(own.device));
    meet();
    return kInvalidUsage;
  }
  DeviceOrder::of(device_).know(board_->nonce());
  return meet() ? kSuccess : kInternalError;
}

int Communicator::split(int color, int key, CommunicatorPointer* made, bool is_blocking) {
  RankEntry& own = board_->rank(rank_);
  own.color = color;
  own.key = key;
  if (!meet()) return kInternalError;
  int rank = 0;
  int ranks = 0;
  int first = -1;
  for (int each = 0; each < ranks_; ++each) {
    const RankEntry& other = board_->rank(each);
    if (other.color != color) continue;
    if (first < 0) first = each;
    ++ranks;
    if (other.key < key || (other.key == key && each < rank_)) ++rank;
  }
  const bool is_in_any = color >= 0;
  if (is_in_any && first == rank_ && !Board::make(&own.child)) return kSystemError;
  if (!meet()) return kInternalError;
  if (!is_in_any) return kSuccess;
  *made = std::make_shared<Communicator>(rank, ranks, device_, is_blocking);
  const int result = (*made)->join(board_->rank(first).child);
  (*made)->set_state(result);
  return result;
}

void Communicator::run(const std::string& call, uint64_t number, const void* shown, size_t bytes, const Use& use) {
  if (fails_after_ >= 0 && fails_after_-- == 0) return fail(fails_with_, "an error that a test asked for");
  RankEntry& own = board_->rank(rank_);
  std::snprintf(own.call, sizeof own.call, "%s", call.c_str());
  if (bytes != 0) std::memcpy(board_->slot(rank_), shown, bytes);
  if (!meet(number)) return;
  for (int each = 0; each < ranks_; ++each) {
    const RankEntry& other = board_->rank(each);
    if (call != other.call) {
      const std::string text = "rank " + std::to_string(rank_) + " calls " + call + ", rank " + std::to_string(each) +
                               " calls " + other.call;
      report(text);
      return fail(kInvalidUsage, text);
    }
  }
  std::vector<char*> slots;
  for (int each = 0; each < ranks_; ++each) slots.push_back(board_->slot(each));
  if (late_us_ != 0) std::this_thread::sleep_for(std::chrono::microseconds(late_us_));
  use(slots);
  meet();
}

// Moves all messages of a group, piece by piece, whichever peer is ready.
void Communicator::run(std::vector<Message> messages) {
  if (fails_after_ >= 0 && fails_after_-- == 0) return fail(fails_with_, "an error that a test asked for");
  std::vector<size_t> moved(messages.size());
  const auto step = [&] {
    bool has_moved = false;
    for (size_t each = 0; each < messages.size(); ++each) {
      const Message& message = messages[each];
      Box& box = message.is_outgoing ? board_->box(rank_, message.peer) : board_->box(message.peer, rank_);
      const bool is_free = box.sent == box.taken;
      // Messages to one peer keep their order, and a message of no bytes has one empty piece.
      const auto is_before = [&](size_t other) {
        return messages[other].peer == message.peer && messages[other].is_outgoing == message.is_outgoing;
      };
      bool is_next = moved[each] <= message.bytes && is_free == message.is_outgoing;
      for (size_t other = 0; other < each; ++other)
        if (is_before(other) && moved[other] <= messages[other].bytes) is_next = false;
      if (!is_next) continue;
      char* memory = static_cast<char*>(message.memory) + moved[each];
      if (message.is_outgoing) {
        box.bytes = std::min(kBoxBytes, message.bytes - moved[each]);
        box.message_bytes = message.bytes;
        std::memcpy(box.data, memory, box.bytes);
        moved[each] += box.bytes;
        ++box.sent;
      } else {
        if (box.message_bytes != message.bytes) {
          const std::string text = "rank " + std::to_string(message.peer) + " sends " +
                                   std::to_string(box.message_bytes) + " bytes, rank " + std::to_string(rank_) +
                                   " receives " + std::to_string(message.bytes);
          report(text);
          fail(kInvalidUsage, text);
          return true;
        }
        std::memcpy(memory, box.data, box.bytes);
        moved[each] += box.bytes;
        ++box.taken;
      }
      if (moved[each] == message.bytes) moved[each] = message.bytes + 1;  // ended
      has_moved = true;
    }
    return has_moved;
  };
  const auto has_ended = [&] {
    for (size_t each = 0; each < messages.size(); ++each)
      if (moved[each] <= messages[each].bytes) return false;
    return true;
  };
  while (!is_aborted_ && !has_ended())
    if (!until(step)) return;
}

DeviceOrder& DeviceOrder::of(int device) {
  static auto* all = new std::map<int, DeviceOrder>;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  return (*all)[device];
}

std::function<void()> DeviceOrder::place(const CommunicatorPointer& communicator, const Operation& operation) {
  const std::lock_guard lock(mutex_);
  const uint64_t own_number = ++given_[communicator->id()];
  communicator->show(own_number, given_);
  const uint64_t number = next_++;
  ++communicator->running;
  return [=, this] {
    while (ended_ != number && !communicator->is_aborted()) std::this_thread::sleep_for(kPause);
    if (!communicator->is_aborted()) operation(own_number);
    end(number);
    --communicator->running;
  };
}

void DeviceOrder::know(uint64_t communicator) {
  const std::lock_guard lock(mutex_);
  given_.emplace(communicator, 0);
}

void DeviceOrder::forget(uint64_t communicator) {
  const std::lock_guard lock(mutex_);
  given_.erase(communicator);
}

void DeviceOrder::end(uint64_t number) {
  const std::lock_guard lock(mutex_);
  ended_early_[number] = true;
  while (ended_early_.erase(ended_) != 0) ++ended_;
}

}  // namespace standin
