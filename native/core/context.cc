#include "context.h"

#include <linux/futex.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <utility>

#include "digest.h"

namespace multiring {
namespace {

constexpr size_t kMostEvents = 1 << 16;
constexpr size_t kMostOfTimeline = 1 << 20;  // 80 MB: what a group of one rank does in a second or so, and somebody drains it more often
// A rank's last words travel for at most about this long behind the news of its end.
constexpr auto kLastWords = std::chrono::milliseconds(100);
constexpr auto kMeetingSpin = std::chrono::microseconds(20);  // with the caller's locks held
constexpr auto kGossip = std::chrono::seconds(3);     // what a rank that left has sent is in this host's kernel by then
constexpr auto kHandingOn = std::chrono::seconds(30);  // a peer that is late does not wait for ever for who has left
constexpr size_t kQuickBytes = 4096;
constexpr int kDoorPause_ms = 10;  // between two looks at connections that are being made
constexpr auto kNapsFor = std::chrono::milliseconds(10);  // after the last quick operation that nobody waited for
constexpr auto kCongestedSleep = std::chrono::milliseconds(1);

std::string random_name() {
  std::string name = "multiring-";
  for (const uint8_t byte : random_nonce()) {
    name.push_back("0123456789abcdef"[byte / 16]);
    name.push_back("0123456789abcdef"[byte % 16]);
  }
  return name;
}

double seconds_since(Clock::time_point at) { return std::chrono::duration<double>(Clock::now() - at).count(); }

void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

uint32_t this_thread() {
  static thread_local const auto number = static_cast<uint32_t>(::syscall(SYS_gettid));
  return number;
}

uint64_t first_bytes(const Digest& digest) {
  uint64_t first = 0;
  std::memcpy(&first, digest.data(), sizeof first);
  return first;
}

// Who takes part in the group from there on is not known any more.
bool ends_group(LossKind kind) { return kind == LossKind::silent || kind == LossKind::aborted; }

const char* verb(LossKind kind) {
  if (kind == LossKind::cut_off) return "cannot be reached";
  return kind == LossKind::left ? "left the job" : "died";
}

}  // namespace

int64_t nanoseconds(Clock::time_point at) {
  return at == Clock::time_point{}
             ? 0
             : std::chrono::duration_cast<std::chrono::nanoseconds>(at.time_since_epoch()).count();
}

Clock::duration as_duration(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::min(seconds, 1e9)));
}

Context::Context(ContextConfig config)
    : config_(std::move(config)), handover_name_(random_name()), links_(static_cast<size_t>(config_.size)) {
  const auto nonce = random_nonce();
  std::memcpy(&witness_, nonce.data(), sizeof witness_);
  segment_ = std::make_shared<Segment>(config_.segment_bytes);
  doorbell_ = std::make_unique<Doorbell>(handover_name_ + "-bell", doorbell_word_of(config_.rank));
  poller_.add(doorbell_->fd(), EPOLLIN, [this](uint32_t) { doorbell_->silence(); });
  open_handover();
  progress_ = std::make_unique<std::thread>([this] { progress_loop(); });
}

Context::~Context() {
  if (origin_.is_inherited()) {  // the thread exists in the parent only
    [[maybe_unused]] const auto* parents = progress_.release();
    return;
  }
  close(0, false);
}

// ---- driving -------------------------------------------------------------------------------

void Context::progress_loop() {
  std::array<Poller::Ready, 64> ready;
  Lock lock(mutex_);
  bool came = false;  // something over sockets that may not have been made use of yet
  while (!stopped_) {
    bool moved = false;
    if (came || !caller_drives_) moved = drive();
    if (Clock::now() >= next_tick_) guarded([this] { tick(); });
    if (caller_drives_ && std::exchange(told_of_, ended_) != ended_) wake_self();  // its operation may be among them
    if (Clock::now() >= next_rail_watch_) guarded([this] { watch_rails(); });
    if (Clock::now() >= next_wire_watch_) guarded([this] { watch_wires(); });
    // Peers ring this thread only once no caller has driven for a second: a doorbell for each of a caller's quick
    // operations would cost the peers more than the operations.
    const bool callers_rest = !caller_drives_ && (!running_.empty() || seconds_since(last_caller_) > 1);
    const bool watches = rails_need_watching();
    const bool calls = is_calling();
    if (calls) tend_calls();
    if (listens_again_ && Clock::now() >= *listens_again_) listen_again();
    int timeout_ms = callers_rest && !waits_for_time() ? -1 : 1000;
    if (!tcp_links_.empty()) {  // also while nothing else happens
      const int look_ms = std::max(1, static_cast<int>(std::min(config_.wire_timeout_s, 1e4) * 1000 / 16));
      timeout_ms = timeout_ms < 0 ? look_ms : std::min(timeout_ms, look_ms);
    }
    if (watches) timeout_ms = std::max(1, static_cast<int>(config_.rail_timeout_s * 125));
    if (calls || listens_again_) timeout_ms = timeout_ms < 0 ? kDoorPause_ms : std::min(timeout_ms, kDoorPause_ms);
    if (moved) {
      timeout_ms = 0;
    } else {
      if (congested()) timeout_ms = 1;
      if (callers_rest && !may_sleep(ControlPage::kSocketSleeper)) timeout_ms = 0;
      // The next quick operation need not wake this thread.
      if (timeout_ms != 0 && Clock::now() - last_quick_ < kNapsFor) timeout_ms = 1;
    }
    naps_ = timeout_ms == 0 || timeout_ms == 1;
    lock.unlock();
    int count = 0;
    std::string failure;
    try {
      count = poller_.wait(ready.data(), static_cast<int>(ready.size()), timeout_ms);
    } catch (const Fault& error) {  // a program that closed descriptors which are not its own
      failure = error.what();
    }
    lock.lock();
    if (!failure.empty()) {
      break_down(failure);
      changed_.wait(lock, [this] { return stopped_; });
      return;
    }
    segment_->mapping().control().sleepers.fetch_and(~ControlPage::kSocketSleeper, std::memory_order_seq_cst);
    for (int i = 0; i < count; ++i) dispatch(ready[static_cast<size_t>(i)]);
    came = count > 0 || moved;
  }
}

void Context::dispatch(const Poller::Ready& ready) {
  guarded([&] { poller_.dispatch(ready); });
}

void Context::break_down(const std::string& why) {
  if (!broken_.empty()) return;
  broken_ = "this rank cannot communicate any more: " + why;
  tell_everyone({.kind = FrameKind::lost, .slot = static_cast<uint32_t>(LossKind::died),
                 .offset = static_cast<uint64_t>(config_.rank)});
  const auto running = running_;
  for (const auto& [key, operation] : running) {
    fail_alone(*operation, broken_);
    end_if_over(operation);
  }
  changed_.notify_all();
}

// Announces that this rank is about to sleep; false if news came in meanwhile.
bool Context::may_sleep(uint32_t sleeper) {
  ControlPage& control = segment_->mapping().control();
  control.sleepers.fetch_or(sleeper, std::memory_order_seq_cst);
  if (!has_news()) return true;
  control.sleepers.fetch_and(~sleeper, std::memory_order_seq_cst);
  return false;
}

bool Context::has_news() const {
  const auto& pending = segment_->mapping().control().pending;
  return std::any_of(std::begin(pending), std::end(pending), [](const auto& word) { return word.load(std::memory_order_seq_cst) != 0; });
}

// Wakes whichever thread of this process sleeps for peers' news; mutex held.
void Context::wake_self() {
  ControlPage& control = segment_->mapping().control();
  control.sleepers.fetch_and(~ControlPage::kFutexSleeper, std::memory_order_seq_cst);
  ::syscall(SYS_futex, &control.sleepers, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
  changed_.notify_all();
}

bool Context::congested() const {
  return std::any_of(local_links_.begin(), local_links_.end(),
                     [this](const ShmLink* link) {
                       return link != nullptr && link->congested() && !losses_.contains(link->peer());
                     });
}

bool Context::receive_local() {
  ControlPage& control = segment_->mapping().control();
  bool any = false;
  for (size_t word = 0; word * 64 < local_links_.size(); ++word) {
    uint64_t bits = control.pending[word].load(std::memory_order_relaxed);
    if (bits == 0) continue;
    bits = control.pending[word].exchange(0, std::memory_order_seq_cst);
    while (bits != 0) {
      const auto index = word * 64 + static_cast<size_t>(__builtin_ctzll(bits));
      bits &= bits - 1;
      if (index < local_links_.size() && local_links_[index] != nullptr) any |= local_links_[index]->receive();
    }
  }
  return any;
}

bool Context::drive_one(const std::shared_ptr<Operation>& operation) {
  bool any = true;
  try {
    any = operation->drive();
  } catch (const std::exception& error) {  // no memory for scratch, an address that cannot be reached
    fail_alone(*operation, error.what());
  }
  end_if_over(operation);
  return any;
}

void Context::end_if_over(const std::shared_ptr<Operation>& operation) {
  if (operation->ended() && running_.contains(operation->spec().key)) end_of(operation);
}

bool Context::drive() {
  bool any = false;
  guarded([&] { any = drive_all(); });
  return any;
}

// What a link cannot hand on fails the operation it belongs to, and no other.
bool Context::fail_stuck() {
  bool any = false;
  for (const auto& [key, why] : std::exchange(stuck_, {})) {
    const auto found = running_.find(key);
    if (found == running_.end() || found->second->has_failed()) continue;
    const auto operation = found->second;
    fail_alone(*operation, why);
    end_if_over(operation);
    any = true;
  }
  return any;
}

bool Context::drive_all() {
  bool any = receive_local();
  const Operation* in_slots = nullptr;
  for (auto at = running_.begin(); at != running_.end();) {
    const auto operation = at->second;
    if (operation->state() == Operation::State::in_slots && causes_.contains(at->first)) {
      ++at;  // whoever failed it must not be found in the slots
      any |= settle(operation);
      continue;
    }
    // To the other ranks, a group's later operation means that this rank is done with the slots.
    if (in_slots != nullptr && in_slots->spec().key.group == at->first.group) {
      ++at;
      continue;
    }
    ++at;
    any |= drive_one(operation);
    if (operation->state() == Operation::State::in_slots) {
      in_slots = operation.get();
    }
  }
  for (const auto& link : links_) {
    if (link) any |= link->pump();
  }
  if (!stuck_.empty()) any |= fail_stuck();
  // Only once nothing moves any more is it sure that a lost rank's last words have been heard; but operations of
  // others may keep moving for ever.
  if (!unsettled_ && new_losses_.empty()) return any;
  auto heard_out = new_losses_.end();
  if (any) {
    const auto since = Clock::now() - kLastWords;
    heard_out = std::find_if(new_losses_.begin(), new_losses_.end(), [&](const NewLoss& each) { return each.found > since; });
    if (heard_out == new_losses_.begin() && heard_out != new_losses_.end()) return any;
  }
  return settle_losses(static_cast<size_t>(heard_out - new_losses_.begin())) || any;
}

void Context::end_of(const std::shared_ptr<Operation>& operation) {
  const auto& spec = operation->spec();
  running_.erase(spec.key);
  causes_.erase(spec.key);
  over(spec.key) = spec.key;
  ++ended_;
  record({Event::Kind::operation, spec.name, spec.key, spec.user_bytes, nanoseconds(operation->posted),
          nanoseconds(operation->agreed), nanoseconds(operation->finished), first_bytes(spec.digest), 0, 0, operation->fault()});
  if (spec.tells_mismatch && operation->fault() == FaultKind::mismatch) {
    tell_here({ControlMessage::Kind::mismatch, config_.rank, spec.key.group, spec.key.sequence, {}, operation->descriptions()});
  }
  for (const auto& [start, end, busy] : operation->reductions()) {
    keep({Event::Kind::reduce, spec.name, spec.key, 0, nanoseconds(start), 0, nanoseconds(end), 0,
          std::chrono::duration_cast<std::chrono::nanoseconds>(busy).count()});
  }
  changed_.notify_all();
}

void Context::record(const Event& event) {
  if (events_.size() == kMostEvents) {
    events_.pop_front();
    ++dropped_events_;
  }
  events_.push_back(event);
  keep(event);
}

void Context::keep(const Event& event) {
  if (!keeps_timeline_) return;
  if (timeline_.size() == kMostOfTimeline) {
    ++dropped_from_timeline_;  // the newest: who reads on has the beginnings of all that he was told of
    return;
  }
  timeline_.push_back(event);
}

// ---- operations ----------------------------------------------------------------------------

std::shared_ptr<Operation> Context::post(OperationSpec spec, bool caller_waits) {
  if (origin_.is_inherited()) throw Fault(FaultKind::state, "this process was forked from a rank; only the rank may communicate");
  const Lock lock(mutex_);
  if (closing_) throw Fault(FaultKind::state, "multiring was shut down");
  if (!broken_.empty()) throw Fault(FaultKind::state, broken_);
  const OperationKey key = spec.key;
  const auto stalled = stalled_groups_.find(key.group);
  if (stalled != stalled_groups_.end()) {
    throw Fault(FaultKind::stall, "the group is unusable: in an earlier operation " + stalled->second);
  }
  if (running_.contains(key)) throw Fault(FaultKind::state, "an operation with this key is in flight");
  const bool meets = may_meet(spec, key);
  auto operation = std::make_shared<Operation>(std::move(spec), static_cast<Host&>(*this));
  if (meets) {
    operation->begin_in_slots(false);
    wake_waiting(*operation->spec().slots);
  }
  begin(operation);
  if (caller_drives_) {
    wake_self();
  } else if (!caller_waits) {
    if (is_quick(*operation)) last_quick_ = Clock::now();
    if (!is_quick(*operation) || !drive_here(operation)) poller_.wake();
  }
  return operation;
}

// Whether an operation is small, and of ranks of this host: what it has to send is there as soon as it is written.
bool Context::is_quick(const Operation& operation) const {
  const auto& members = operation.spec().members;
  return operation.spec().user_bytes <= kQuickBytes && members.size() <= local_ranks_.size() &&
         std::all_of(members.begin(), members.end(), [this](int member) { return local_rank(member); });
}

// Drives an operation that nobody waits for on the thread that posts it, which costs less than to wake another one; false:
// the progress thread has to be woken. Where it naps it sees to the rest within a millisecond; who waits for it, at once.
bool Context::drive_here(const std::shared_ptr<Operation>& operation) {
  if (!naps_ || running_.size() > 1 || unsettled_ || !new_losses_.empty() || congested()) return false;
  guarded([&] {
    receive_local();
    drive_one(operation);
    for (ShmLink* link : local_links_) {
      if (link != nullptr) link->pump();
    }
    fail_stuck();
  });
  return true;
}

void Context::begin(const std::shared_ptr<Operation>& operation) {
  const OperationKey key = operation->spec().key;
  running_[key] = operation;
  const auto unexpected = unexpected_.find(key);
  if (unexpected != unexpected_.end()) {
    const auto frames = std::move(unexpected->second);
    unexpected_.erase(unexpected);
    for (const auto& [peer, frame, payload] : frames) on_frame(peer, frame, payload);
  }
  const auto stall = stalls_.find(key.group);
  if (stall != stalls_.end() && key.sequence > stall->second.sequence) {
    causes_.try_emplace(key, stall->second.cause);
    unsettled_ = true;
  }
  if (!losses_.empty()) unsettled_ = true;
}

bool Context::may_meet(const OperationSpec& spec, OperationKey key) const {
  if (!spec.meets || !config_.lower || !spec.slots || !spec.slots->may_publish(key.sequence)) return false;
  // Somebody does not meet, or has failed already.
  if (unexpected_.contains(key) || causes_.contains(key) || stalls_.contains(key.group)) return false;
  const auto other = running_.lower_bound({key.group, 0});
  return other == running_.end() || other->first.group != key.group;
}

void Context::wake_waiting(const SharedSlots& slots) {
  slots.wake_waiting([this](int rank) {
    for (const ShmLink* link : local_links_) {
      if (link != nullptr && link->peer() == rank) link->wake();
    }
  });
}

Context::Attempt Context::meet(const OperationSpec& model, uint64_t group, std::atomic<uint64_t>& sequence, uint64_t steps,
                               std::byte* data) {
  if (origin_.is_inherited()) throw Fault(FaultKind::state, "this process was forked from a rank; only the rank may communicate");
  const Lock lock(mutex_, std::try_to_lock);
  if (!lock || closing_ || !broken_.empty() || !losses_.empty() || stalled_groups_.contains(group)) return {};
  if (has_news()) receive_local();
  uint64_t before = sequence.load();
  const OperationKey key{group, before + steps};
  if (config_.log_moves || unsettled_ || !new_losses_.empty() || !may_meet(model, key)) return {};
  if (!sequence.compare_exchange_strong(before, key.sequence)) return {};
  const auto start = Clock::now();
  const auto until = start + std::min<Clock::duration>(kMeetingSpin, as_duration(spin_s_));
  const size_t bytes = model.program ? model.user_bytes : 0;
  model.slots->publish(key.sequence, model.digest, data, bytes);
  wake_waiting(*model.slots);
  for (int turn = 1;; ++turn) {
    const auto seen = model.slots->look(key.sequence, model.digest);
    if (seen == SharedSlots::Seen::all) {
      if (model.program) combine_published(*model.program, *model.slots, key.sequence, data, bytes);
      last_caller_ = Clock::now();
      const int64_t end = nanoseconds(last_caller_);
      model.slots->note_end(key.sequence);
      over(key) = key;
      record({Event::Kind::operation, model.name, key, model.user_bytes, nanoseconds(start), end, end,
              first_bytes(model.digest)});
      record({Event::Kind::wait, model.name, key, 0, nanoseconds(start), 0, end, 0, 0, keeps_timeline_ ? this_thread() : 0});
      return {true, nullptr};
    }
    if (seen == SharedSlots::Seen::different) break;
    if (turn % 16 == 0 && (has_news() || Clock::now() > until)) break;
    cpu_relax();
  }
  OperationSpec spec = model;
  spec.key = key;
  spec.bases[1] = data;
  const auto operation = std::make_shared<Operation>(std::move(spec), static_cast<Host&>(*this));
  operation->posted = start;  // what is published already, others may have ended meanwhile
  operation->begin_in_slots(true);
  begin(operation);
  if (caller_drives_) wake_self();
  return {false, operation};
}

Context::Waited Context::wait(const std::shared_ptr<Operation>& operation, double timeout_s) {
  if (origin_.is_inherited()) throw Fault(FaultKind::state, "this process was forked from a rank; only the rank may communicate");
  const auto start = Clock::now();
  const auto deadline = start + as_duration(timeout_s);
  Lock lock(mutex_);
  Waited result = Waited::ended;
  while (!operation->ended()) {
    if (caller_drives_) {
      if (changed_.wait_until(lock, deadline) == std::cv_status::timeout) {
        result = Waited::timed_out;
        break;
      }
      continue;
    }
    caller_drives_ = true;
    auto& sleepers = segment_->mapping().control().sleepers;
    if ((sleepers.fetch_and(~ControlPage::kSocketSleeper) & ControlPage::kSocketSleeper) != 0) poller_.wake();
    // What comes over sockets comes to the progress thread, which needs the core that spinning would take.
    const auto& members = operation->spec().members;
    const bool spins = std::none_of(members.begin(), members.end(), [&](int member) { return tcp_links_.contains(member); });
    const auto spin_until = Clock::now() + as_duration(spins ? spin_s_ : 0);
    while (!operation->ended()) {
      const bool driven = drive();
      if (operation->ended()) break;
      const auto now = Clock::now();
      if (now >= next_tick_) guarded([this] { tick(); });
      if (now >= deadline) {
        result = Waited::timed_out;
        break;
      }
      if (driven) {
        lock.unlock();  // between two turns others may post, or ask
        lock.lock();
        continue;
      }
      if (now < spin_until) {
        lock.unlock();  // let posters and the progress thread in
        for (int i = 0; i < 16; ++i) cpu_relax();
        lock.lock();
        continue;
      }
      if (!may_sleep(ControlPage::kFutexSleeper)) continue;
      auto nap = std::min<Clock::duration>(deadline - now, std::chrono::seconds(1));
      if (congested()) nap = std::min<Clock::duration>(nap, kCongestedSleep);
      timespec relative{};
      relative.tv_sec = std::chrono::duration_cast<std::chrono::seconds>(nap).count();
      relative.tv_nsec = (std::chrono::duration_cast<std::chrono::nanoseconds>(nap) % std::chrono::seconds(1)).count();
      lock.unlock();
      const long slept = ::syscall(SYS_futex, &sleepers, FUTEX_WAIT, ControlPage::kFutexSleeper, &relative, nullptr, 0);
      const bool interrupted = slept != 0 && errno == EINTR;
      lock.lock();
      sleepers.fetch_and(~ControlPage::kFutexSleeper, std::memory_order_seq_cst);
      if (interrupted && !operation->ended()) {
        result = Waited::interrupted;
        break;
      }
    }
    caller_drives_ = false;
    last_caller_ = Clock::now();
    const bool is_seen_to =
        naps_ && std::all_of(running_.begin(), running_.end(), [this](const auto& each) { return is_quick(*each.second); });
    if (congested() || (!running_.empty() && !is_seen_to)) poller_.wake();  // the rest is the progress thread's again
    changed_.notify_all();
    break;
  }
  record({Event::Kind::wait, operation->spec().name, operation->spec().key, 0, nanoseconds(start), 0,
          nanoseconds(Clock::now()), 0, 0, keeps_timeline_ ? this_thread() : 0});
  return operation->ended() ? Waited::ended : result;
}

std::vector<std::pair<int, uint64_t>> Context::goodputs() {
  const Lock lock(mutex_);
  std::vector<std::pair<int, uint64_t>> found;
  for (const auto& [peer, link] : tcp_links_) {
    const auto by_mpi = mpi_links_.find(peer);
    const uint64_t rate = by_mpi != mpi_links_.end() ? by_mpi->second->goodput() : link->goodput();
    if (rate != 0) found.emplace_back(peer, rate);
  }
  return found;
}

bool Context::has_ended(const Operation& operation) {
  const Lock lock(mutex_);
  return operation.ended();
}

std::pair<std::vector<int>, double> Context::stalled_on(const Operation& operation) {
  const Lock lock(mutex_);
  if (operation.ended()) return {{}, 0.0};
  auto ranks = operation.culprit >= 0 ? std::vector<int>{operation.culprit} : operation.waiting_for();
  return {std::move(ranks), seconds_since(operation.moved)};
}

std::vector<Event> Context::take_events() {
  const Lock lock(mutex_);
  const auto taken = std::exchange(events_, {});
  return {taken.begin(), taken.end()};
}

uint64_t Context::dropped_events() {
  const Lock lock(mutex_);
  return dropped_events_;
}

void Context::keep_timeline(bool keeps) {
  const Lock lock(mutex_);
  if (keeps) {
    timeline_.clear();
    dropped_from_timeline_ = 0;
  }
  keeps_timeline_ = keeps;
}

std::vector<Event> Context::take_timeline() {
  const Lock lock(mutex_);
  std::vector<Event> next;
  next.reserve(timeline_.size());  // it may need as much again, and whoever records is not to wait for that
  return std::exchange(timeline_, std::move(next));
}

uint64_t Context::dropped_from_timeline() {
  const Lock lock(mutex_);
  return dropped_from_timeline_;
}

size_t Context::unexpected_frames() {
  const Lock lock(mutex_);
  size_t sum = 0;
  for (const auto& [key, frames] : unexpected_) sum += frames.size();
  return sum;
}

std::map<int, Loss> Context::losses() {
  const Lock lock(mutex_);
  return losses_;
}

bool Context::has_failed() {
  const Lock lock(mutex_);
  return !broken_.empty() || !stalled_groups_.empty() ||
         std::any_of(losses_.begin(), losses_.end(), [](const auto& loss) { return is_death(loss.second.kind); });
}

std::vector<int> Context::read_by() {
  const Lock lock(mutex_);
  receive_local();
  std::vector<int> ranks;
  for (const ShmLink* link : local_links_) {
    if (link != nullptr && link->is_read_by_peer()) ranks.push_back(link->peer());
  }
  return ranks;
}

// ---- frames and losses ---------------------------------------------------------------------

// Whether a frame's words can be what a rank says: some of them name ranks, and what became of them.
bool Context::makes_sense(const Frame& frame) const {
  const auto of_this_job = frame.offset < static_cast<uint64_t>(config_.size);
  const auto kind = static_cast<LossKind>(frame.slot);
  switch (frame.kind) {
    case FrameKind::there:
      return of_this_job;
    case FrameKind::lost:
      return of_this_job && is_loss_of_rank(kind);
    case FrameKind::fail:
      // A stall may name nobody.
      return kind >= LossKind::died && kind <= LossKind::cut_off &&
             (of_this_job || (kind == LossKind::silent && static_cast<int64_t>(frame.offset) == -1));
    default:
      return true;
  }
}

void Context::on_frame(int peer, const Frame& frame, std::span<const std::byte> payload) {
  if (!makes_sense(frame)) {
    note_loss(peer, LossKind::died, "it sent a frame of kind " + std::to_string(static_cast<int>(frame.kind)) + " that makes no sense");
    return;
  }
  if (frame.kind == FrameKind::lost) {
    const auto lost = static_cast<int>(frame.offset);
    const auto kind = static_cast<LossKind>(frame.slot);
    if (lost < 0 || lost >= config_.size) return;
    if (lost == config_.rank) {
      if (kind == LossKind::cut_off) on_exclusion(peer);
      return;
    }
    // Somebody else's word must not overtake what a rank that left has said on its own connection.
    const auto own = tcp_links_.find(lost);
    if (lost != peer && kind == LossKind::left) {
      if (own != tcp_links_.end() && own->second->is_open()) return;
      // Or, where it has connected only just now, what is on the way to here.
      if (!local_rank(lost) && !losses_.contains(lost)) {
        gossip_.try_emplace(lost, Clock::now() + kGossip, "as rank " + std::to_string(peer) + " found");
        return;
      }
    }
    const std::string found_by = "as rank " + std::to_string(peer) + " found";
    note_loss(lost, kind, kind == LossKind::cut_off ? "nothing comes from " + place_of(lost) + " any more, " + found_by : found_by);
    return;
  }
  if (frame.kind == FrameKind::control || frame.kind == FrameKind::control_taken) {
    on_control(peer, frame, payload);
    return;
  }
  const auto found = running_.find(frame.key());
  if (frame.kind == FrameKind::where) {
    Frame answer{.group = frame.group, .sequence = frame.sequence, .kind = FrameKind::there};
    answer.offset = static_cast<uint64_t>(config_.rank);
    auto asked = found;
    if (asked == running_.end()) {  // not come to it: what counts is whom it waits for in the group's oldest
      asked = running_.lower_bound({frame.group, 0});
      if (asked != running_.end() && (asked->first.group != frame.group || asked->first.sequence > frame.sequence)) {
        asked = running_.end();
      }
    }
    if (asked != running_.end()) {
      const auto& operation = *asked->second;
      const auto waits = operation.waiting_for();
      if (operation.culprit >= 0) {
        answer.offset = static_cast<uint64_t>(operation.culprit);
      } else if (!waits.empty()) {
        answer.offset = static_cast<uint64_t>(waits.front());
      }
    }
    links_[static_cast<size_t>(peer)]->send(answer);
    return;
  }
  if (frame.kind == FrameKind::fail) {
    if (ends_group(static_cast<LossKind>(frame.slot))) fail_later(frame.key(), cause_of(frame));
    // Said once, when the frame comes; an operation that is posted only then knows of it from the beginning.
    if (found != running_.end()) found->second->on_failure(peer);
    if (frame.round != 0) links_[static_cast<size_t>(peer)]->send({.group = frame.group, .sequence = frame.sequence, .kind = FrameKind::quiet});
  }
  if (found == running_.end()) {
    if (frame.kind != FrameKind::round && frame.kind != FrameKind::fail) return;
    if (over(frame.key()) == frame.key() || stalled_groups_.contains(frame.group)) return;  // nobody will post it
    unexpected_[frame.key()].push_back({peer, frame, {payload.begin(), payload.end()}});
    unexpected_[frame.key()].back().frame.round = frame.kind == FrameKind::fail ? 0 : frame.round;
    return;
  }
  Operation& operation = *found->second;
  if (frame.kind == FrameKind::quiet) {
    operation.on_quiet(peer);
    return;
  }
  if (frame.kind == FrameKind::round) {
    operation.on_round(peer, frame, payload);
  } else if (frame.kind == FrameKind::there) {
    operation.culprit = static_cast<int>(frame.offset);
  } else if (frame.kind == FrameKind::fail) {
    const FailureCause cause = cause_of(frame);
    if (cause.rank == config_.rank && cause.kind == LossKind::cut_off) {
      on_exclusion(peer);
      return;
    }
    causes_.try_emplace(frame.key(), cause);
    if (is_loss_of_rank(cause.kind)) {
      const std::string found_by = "as rank " + std::to_string(peer) + " found";
      note_loss(cause.rank, cause.kind,
                cause.kind == LossKind::cut_off ? "nothing comes from " + place_of(cause.rank) + " any more, " + found_by : found_by);
    }
    unsettled_ = true;
  }
}

Context::FailureCause Context::cause_of(const Frame& frame) {
  FailureCause cause{static_cast<int>(frame.offset), static_cast<LossKind>(frame.slot), 0};
  std::memcpy(&cause.quiet_s, frame.note.data(), sizeof cause.quiet_s);
  return cause;
}

// Who stalled in an operation takes part in no later one of its group. Ranks that ended that one before are to name
// whom it waited for, not it, because it left.
void Context::fail_later(const OperationKey& key, const FailureCause& cause) {
  stalls_.try_emplace(key.group, Stall{key.sequence, cause});
  for (auto at = running_.upper_bound(key); at != running_.end() && at->first.group == key.group; ++at) {
    causes_.try_emplace(at->first, cause);
    unsettled_ = true;
  }
}

bool Context::local_rank(int rank) const {
  return std::find(local_ranks_.begin(), local_ranks_.end(), rank) != local_ranks_.end();
}

// Ranks that left, as others say, and from which nothing has come since.
void Context::believe_gossip(Clock::time_point now) {
  for (auto at = gossip_.begin(); at != gossip_.end();) {
    const auto& [lost, said] = *at;
    const auto own = tcp_links_.find(lost);
    if (losses_.contains(lost)) {
      at = gossip_.erase(at);
    } else if (now < said.believed_at || (own != tcp_links_.end() && own->second->is_open())) {
      ++at;
    } else {
      note_loss(lost, LossKind::left, said.why);
      at = gossip_.erase(at);
    }
  }
}

void Context::on_loss(int peer, LossKind kind, const std::string& why) {
  note_loss(peer, kind, kind == LossKind::cut_off ? "nothing has come from " + place_of(peer) + " " + why : why);
}

// "host1 (ranks 4-7)"
std::string Context::place_of(int rank) const {
  const auto found = addresses_.find(rank);
  return found == addresses_.end() || found->second.host.empty() ? "its host" : found->second.host;
}

// A rank that lives was given up by `peer`, which cannot hear it, and hears of that from others, or over a wire that
// goes one way. What it finds in turn is for nobody else to act on: the others can hear that rank.
void Context::on_exclusion(int peer) {
  new_losses_.push_back({peer, {LossKind::cut_off, "nothing from this rank comes to " + place_of(peer) + " any more"}, Clock::now(), false});
  changed_.notify_all();
}

void Context::note_loss(int lost, LossKind kind, const std::string& why) {
  new_losses_.push_back({lost, {kind, why}, Clock::now()});
  changed_.notify_all();  // whoever closes waits for its peers to hang up
}

void Context::tell_everyone(const Frame& frame) {
  for (const auto& link : links_) {
    if (link && !losses_.contains(link->peer())) link->send(frame);
  }
}

// Fails what cannot be finished without the ranks that are gone, the first `count` of those newly found among them.
bool Context::settle_losses(size_t count) {
  unsettled_ = false;
  bool any = false;
  const auto failing = running_;  // failing changes it
  // What a member failed for is passed on before it is relayed that it has left: some have no connection with it.
  for (const auto& [key, operation] : failing) {
    if (causes_.contains(key)) any |= settle(operation);
  }
  const auto end = new_losses_.begin() + static_cast<std::ptrdiff_t>(count);
  const std::vector<NewLoss> settled(std::make_move_iterator(new_losses_.begin()), std::make_move_iterator(end));
  new_losses_.erase(new_losses_.begin(), end);
  for (const auto& [lost, loss, found, is_passed_on] : settled) {
    const auto [known, is_new] = losses_.try_emplace(lost, loss);
    if (!is_new) continue;
    loss_order_.push_back(lost);
    tell_here({ControlMessage::Kind::loss, lost, 0, static_cast<uint64_t>(loss.kind), loss.why, {}});
    if (closing_ || !is_passed_on) continue;
    const Frame news{.kind = FrameKind::lost, .slot = static_cast<uint32_t>(loss.kind), .offset = static_cast<uint64_t>(lost)};
    tell_everyone(news);
    Link* its_own = loss.kind == LossKind::cut_off ? links_[static_cast<size_t>(lost)].get() : nullptr;
    if (its_own != nullptr) its_own->send(news);  // it may hear, though it is not heard
  }
  const auto running = running_;
  for (const auto& [key, operation] : running) any |= settle(operation);
  return any;
}

// A rank that died takes every operation it belongs to with it. One that left had finished its own part, so only those
// that still wait for it can never end. The cause named is what another member failed for, else the first death learned
// of, else a leave-taking: ranks that raise because of a death end their programs too.
bool Context::settle(const std::shared_ptr<Operation>& operation) {
  if (operation->has_failed()) return false;
  const auto failing = causes_.find(operation->spec().key);
  if (failing != causes_.end()) {
    const FailureCause cause = failing->second;
    const auto [lost, kind, quiet_s] = cause;
    if (ends_group(kind)) {
      stall(operation, cause);
      return true;
    }
    if (kind == LossKind::unable) {
      tell_members(*operation, lost, kind, quiet_s);
      operation->fail(FaultKind::state, "rank " + std::to_string(lost) + " could not go on with it; its own error says why");
    } else {
      const auto known = losses_.find(lost);
      fail_for(*operation, lost, known != losses_.end() ? known->second : Loss{kind, "as another rank found"});
    }
    end_if_over(operation);
    return true;
  }
  const auto waits = operation->waiting_for();
  int cause = -1;
  for (const int lost : loss_order_) {
    if (!operation->involves(lost)) continue;
    const bool died = is_death(losses_.at(lost).kind);
    const bool waits_for_it = std::find(waits.begin(), waits.end(), lost) != waits.end();
    if (died) {
      cause = lost;
      break;
    }
    if (waits_for_it && cause < 0) cause = lost;
  }
  if (cause < 0) return false;
  fail_for(*operation, cause, losses_.at(cause));
  end_if_over(operation);
  return true;
}

void Context::tell_members(const Operation& operation, int lost, LossKind kind, int64_t quiet_s) {
  const OperationKey key = operation.spec().key;
  for (const int peer : operation.spec().members) {
    Link* known = peer == config_.rank ? nullptr : links_[static_cast<size_t>(peer)].get();
    if (known == nullptr || losses_.contains(peer)) continue;
    Frame frame{.group = key.group, .sequence = key.sequence, .kind = FrameKind::fail,
                .slot = static_cast<uint32_t>(kind), .offset = static_cast<uint64_t>(lost)};
    std::memcpy(frame.note.data(), &quiet_s, sizeof quiet_s);
    frame.round = operation.is_written_by_peers() && local_rank(peer) ? 1 : 0;
    known->send(frame);
  }
}

void Context::fail_for(Operation& operation, int lost, const Loss& loss) {
  tell_members(operation, lost, loss.kind);
  operation.fail(FaultKind::peer_lost,
                 "rank " + std::to_string(lost) + " " + verb(loss.kind) + " (" + loss.why + ")");
}

// Fails it on all its ranks, and with it the group.
void Context::stall(const std::shared_ptr<Operation>& operation, const FailureCause& cause) {
  tell_members(*operation, cause.rank, cause.kind, cause.quiet_s);
  const std::string who = cause.rank == config_.rank ? "this rank" : "rank " + std::to_string(cause.rank);
  const bool is_silent = cause.kind == LossKind::silent;
  const std::string text =
      is_silent ? "nothing came from " + who + " for " + std::to_string(cause.quiet_s) + " s" : who + " aborted the group";
  operation->culprit = cause.rank;
  const uint64_t group = operation->spec().key.group;
  stalled_groups_.try_emplace(group, text);
  unexpected_.erase(unexpected_.lower_bound({group, 0}), unexpected_.upper_bound({group, UINT64_MAX}));  // it takes no more operations
  operation->fail(is_silent ? FaultKind::stall : FaultKind::state, text);
  end_if_over(operation);
}

void Context::give_up(const std::shared_ptr<Operation>& operation, int silent) {
  const Lock lock(mutex_);
  if (operation->has_failed() || operation->ended()) return;
  stall(operation, {silent, LossKind::silent, static_cast<int64_t>(seconds_since(operation->moved))});
  wake_driver();
}

void Context::abort(const std::shared_ptr<Operation>& operation, int culprit) {
  const Lock lock(mutex_);
  if (operation->has_failed() || operation->ended()) return;
  stall(operation, {culprit, LossKind::aborted, 0});
  wake_driver();
}

// This rank cannot go on with the operation, so nobody can.
void Context::fail_alone(Operation& operation, const std::string& why) {
  tell_members(operation, config_.rank, LossKind::unable);
  operation.fail(FaultKind::state, why);
}

// About once a second while operations are in flight.
void Context::tick() {
  const auto now = Clock::now();
  next_tick_ = now + std::chrono::milliseconds(std::clamp<int64_t>(static_cast<int64_t>(config_.stall_warn_s * 250), 10, 1000));
  expire_pending();
  believe_gossip(now);
  const auto running = running_;
  for (const auto& [key, operation] : running) {
    if (operation->has_failed()) {
      drive_one(operation);
      continue;
    }
    const double quiet_s = seconds_since(operation->moved);
    if (quiet_s < config_.stall_warn_s / 2 && quiet_s < config_.stall_timeout_s / 4) continue;
    const auto waits = operation->waiting_for();
    if (quiet_s >= config_.stall_timeout_s) {
      const int silent = operation->culprit >= 0 || waits.empty() ? operation->culprit : waits.front();
      stall(operation, {silent, LossKind::silent, static_cast<int64_t>(quiet_s)});
      continue;
    }
    for (const int rank : waits) {
      Link* known = links_[static_cast<size_t>(rank)].get();
      if (known != nullptr) known->send({.group = key.group, .sequence = key.sequence, .kind = FrameKind::where});
    }
  }
}

Link& Context::link(int peer) {
  auto& link = links_[static_cast<size_t>(peer)];
  if (!link) tcp_link(peer);
  return *link;
}

// ---- MPI -----------------------------------------------------------------------------------

void Context::carried(const std::vector<uint64_t>& numbers) {
  const Lock lock(mutex_);
  if (stopped_) return;
  bool is_news = false;
  for (const uint64_t number : numbers) {
    auto done = proxy_.finish(number);
    if (!done) continue;
    auto& [bounce, memory] = *done;
    if (bounce.is_outgoing) {
      proxy_.recycle(std::move(memory));
    } else {
      mpi_links_.at(bounce.peer)->arrived(number, std::move(memory));
      is_news = true;
    }
  }
  if (!is_news) return;
  // Here and now: to wake another thread for it would cost more.
  const bool driven = drive();
  if (caller_drives_) {
    wake_self();
  } else if (driven) {
    poller_.wake();
  }
}

void Context::cannot_reach(int peer, const std::string& why) {
  const Lock lock(mutex_);
  const auto found = mpi_links_.find(peer);
  if (found != mpi_links_.end()) found->second->break_off(why);
  poller_.wake();
}

// ---- the end -------------------------------------------------------------------------------

bool Context::hands_on() const {
  return std::any_of(tcp_links_.begin(), tcp_links_.end(),
                     [this](const auto& entry) { return !losses_.contains(entry.first) && entry.second->holds_frames(); });
}

bool Context::settled(double timeout_s) {
  const auto deadline = Clock::now() + as_duration(timeout_s);
  Lock lock(mutex_);
  poller_.wake();
  while (!is_settled()) {
    if (Clock::now() >= deadline) return false;
    changed_.wait_until(lock, std::min(deadline, Clock::now() + kCongestedSleep));
  }
  return true;
}

void Context::allow_spin(double seconds) {
  const Lock lock(mutex_);
  spin_s_ = seconds;
}

void Context::close(double grace_s, bool announce) {
  const auto deadline = Clock::now() + as_duration(grace_s);
  {
    Lock lock(mutex_);
    if (stopped_) return;
    closing_ = true;
    poller_.wake();
    while (!is_settled() && Clock::now() < deadline) {
      changed_.wait_until(lock, std::min(deadline, Clock::now() + kCongestedSleep));
    }
    // Its own part is done, but not with everybody: some have yet to connect for it.
    const auto last_call = Clock::now() + kHandingOn;
    while (announce && running_.empty() && stalled_groups_.empty() && hands_on() && Clock::now() < last_call) {
      changed_.wait_until(lock, Clock::now() + kCongestedSleep);
    }
    // Before it is said that this rank leaves: from then on nobody expects it to touch the others' memory.
    const auto running = running_;
    for (const auto& [key, operation] : running) {
      operation->fail(FaultKind::state, "multiring was shut down");
      operation->end_quieting();
      end_if_over(operation);
    }
    const Frame leave{.kind = FrameKind::lost, .slot = static_cast<uint32_t>(LossKind::left),
                      .offset = static_cast<uint64_t>(config_.rank)};
    if (announce) {
      tell_everyone(leave);
      for (const auto& [rank, socket] : watches_) {
        [[maybe_unused]] const auto sent = ::send(socket.get(), "L", 1, MSG_NOSIGNAL | MSG_DONTWAIT);
      }
    }
    // Closing a socket with unread bytes would reset it, and with it what the peer has yet to read: say that nothing
    // more comes, and read on until the peers have hung up too, or a moment has passed.
    for (const auto& [rank, link] : tcp_links_) link->hang_up();
    const auto linger = std::min(Clock::now() + std::chrono::milliseconds(500), std::max(deadline, Clock::now()));
    changed_.wait_until(lock, linger, [this] {
      return std::none_of(tcp_links_.begin(), tcp_links_.end(), [](const auto& entry) { return entry.second->is_open(); });
    });
    stopped_ = true;
    poller_.wake();
    changed_.notify_all();
    control_came_.notify_all();
  }
  progress_->join();
  proxy_.close();
  const Lock lock(mutex_);
  watches_.clear();
  pending_handovers_.clear();
  pending_handshakes_.clear();
  tcp_links_.clear();
  mpi_links_.clear();
  local_links_.clear();
  links_.clear();
  listeners_.clear();
  handover_socket_.reset();
  doorbell_.reset();
}

}  // namespace multiring
