#include "context.h"

namespace multiring {

namespace {

constexpr uint16_t kMostConnections = 64;
constexpr size_t kShortestSecret = 16;  // bytes; a shorter secret could be found by trying

ContextConfig checked(ContextConfig config) {
  if (!config.seal) return config;
  if (config.by_mpi) {
    throw Fault(FaultKind::argument, "MULTIRING_SEAL=1 with the mpi engine: MPI's messages cannot be sealed; use sockets");
  }
  if (config.secret.size() < kShortestSecret) {
    throw Fault(FaultKind::argument, "MULTIRING_SEAL=1 with a secret of " + std::to_string(config.secret.size()) +
                                         " bytes: want at least " + std::to_string(kShortestSecret));
  }
  CryptoLibrary::load();
  return config;
}

}  // namespace

Context::Context(ContextConfig config) : state_(checked(std::move(config))) { loop_.start(); }

void Context::use_connections(uint16_t count) {
  const std::string given = "MULTIRING_CONNECTIONS=" + std::to_string(count);
  if (count < 1 || count > kMostConnections) {
    throw Fault(FaultKind::argument, given + ": want a number from 1 to " + std::to_string(kMostConnections));
  }
  if (count == 1) return;
  if (state_.config.by_mpi) {
    throw Fault(FaultKind::argument, given + " with the mpi engine: MPI makes its own connections; use sockets");
  }
  link_threads_.start(count);
}

Context::~Context() {
  if (state_.origin.is_inherited()) {
    loop_.disown();
    link_threads_.disown();
    return;
  }
  close(0, false);
}

bool Context::connect(const std::vector<PeerAddress>& peers, const std::vector<int>& local_ranks,
                      const std::vector<int>& neighbours, double timeout_s,
                      const std::function<bool()>& interrupted) {
  return connector_.connect({peers, local_ranks, neighbours, timeout_s, interrupted}, [this] { driver_.drive(); });
}

bool Context::has_ended(const Operation& operation) {
  return with_lock([&] { return operation.ended(); });
}

void Context::fail(const std::shared_ptr<Operation>& operation, int culprit, LossKind kind) {
  const RankState::Lock lock(state_.mutex);
  if (operation->has_failed() || operation->ended()) return;
  const double quiet_s = kind == LossKind::silent ? seconds_since(operation->moved) : 0;
  failures_.stall(operation, {culprit, kind, static_cast<int64_t>(quiet_s)});
  sleepers_.wake_driver();
}

void Context::give_up(const std::shared_ptr<Operation>& operation, int silent) {
  fail(operation, silent, LossKind::silent);
}

void Context::abort(const std::shared_ptr<Operation>& operation, int culprit) {
  fail(operation, culprit, LossKind::aborted);
}

std::pair<std::vector<int>, double> Context::stalled_on(const Operation& operation) {
  const RankState::Lock lock(state_.mutex);
  if (operation.ended()) return {{}, 0.0};
  auto ranks = operation.culprit >= 0 ? std::vector<int>{operation.culprit} : operation.waiting_for();
  return {std::move(ranks), seconds_since(operation.moved)};
}

std::vector<Event> Context::take_events() {
  return with_lock([this] { return recorder_.take(); });
}

uint64_t Context::dropped_events() {
  return with_lock([this] { return recorder_.dropped(); });
}

void Context::keep_timeline(bool keeps) {
  with_lock([&] { recorder_.keep_timeline(keeps); });
}

std::vector<Event> Context::take_timeline() {
  return with_lock([this] { return recorder_.take_timeline(); });
}

uint64_t Context::dropped_from_timeline() {
  return with_lock([this] { return recorder_.dropped_from_timeline(); });
}

std::map<int, Loss> Context::losses() {
  return with_lock([this] { return peers_.losses(); });
}

bool Context::has_failed() {
  return with_lock([this] { return !state_.broken.empty() || failures_.ends_groups() || peers_.any_died(); });
}

std::vector<std::pair<int, uint64_t>> Context::goodputs() {
  return with_lock([this] { return peers_.goodputs(); });
}

std::vector<RailStatus> Context::rails() {
  return with_lock([this] { return peers_.rails(); });
}

std::vector<RailLoss> Context::take_rail_losses() {
  return with_lock([this] { return rails_.take_losses(); });
}

std::vector<int> Context::read_by() {
  const RankState::Lock lock(state_.mutex);
  peers_.receive_local();
  return peers_.read_by();
}

size_t Context::unexpected_frames() {
  return with_lock([this] { return table_.unexpected_frames(); });
}

void Context::link_with(const std::vector<int>& ranks) {
  const RankState::Lock lock(state_.mutex);
  if (!state_.closing) connector_.link_with(ranks);
}

void Context::wake_control() {
  with_lock([this] { control_.wake(); });
}

void Context::carried(const std::vector<uint64_t>& numbers) {
  const RankState::Lock lock(state_.mutex);
  if (state_.stopped) return;
  bool is_news = false;
  for (const uint64_t number : numbers) {
    auto done = proxy_.finish(number);
    if (!done) continue;
    auto& [bounce, memory] = *done;
    if (bounce.is_outgoing) {
      proxy_.recycle(std::move(memory));
    } else {
      peers_.by_mpi(bounce.peer)->arrived(number, std::move(memory));
      is_news = true;
    }
  }
  if (!is_news) return;
  // Drive on this thread, because waking another thread would cost more.
  const bool driven = driver_.drive();
  if (sleepers_.caller_drives) {
    sleepers_.wake_callers();
  } else if (driven) {
    state_.poller.wake();
  }
}

void Context::cannot_reach(int peer, const std::string& why) {
  const RankState::Lock lock(state_.mutex);
  if (MpiLink* link = peers_.by_mpi(peer)) link->break_off(why);
  state_.poller.wake();
}

void Context::allow_spin(double seconds) {
  with_lock([&] { sleepers_.spin_s = seconds; });
}

void Context::close(double grace_s, bool announce) {
  if (!shutdown_.stop(grace_s, announce)) return;
  loop_.join();
  link_threads_.join();
  proxy_.close();
  const RankState::Lock lock(state_.mutex);
  detector_.drop_watches();
  handover_.drop_pending();
  connector_.listeners().drop_pending();
  peers_.drop_links();
  connector_.listeners().close();
  handover_.drop();
}

}  // namespace multiring
