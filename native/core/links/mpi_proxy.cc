#include "mpi_proxy.h"

#include <algorithm>

namespace multiring {
namespace {

constexpr size_t kMostSpare = 64;  // 16 MiB

// Keeps memory until the process ends, because MPI may still read or write it.
void keep(MpiProxy::Memory memory) {
  static std::mutex mutex;
  static auto* const kept = new std::vector<MpiProxy::Memory>;  // never destroyed
  const std::lock_guard lock(mutex);
  kept->push_back(std::move(memory));
}

}  // namespace

MpiProxy::~MpiProxy() {
  for (auto& [number, entry] : entries_) {
    if (entry.is_collected) keep(std::move(entry.memory));
  }
}

MpiProxy::Memory MpiProxy::memory() {
  const std::lock_guard lock(mutex_);
  if (spare_.empty()) return std::make_unique_for_overwrite<std::byte[]>(kBounceBytes);
  Memory memory = std::move(spare_.back());
  spare_.pop_back();
  return memory;
}

void MpiProxy::recycle(Memory memory) {
  const std::lock_guard lock(mutex_);
  if (spare_.size() < kMostSpare) spare_.push_back(std::move(memory));
}

uint64_t MpiProxy::hand_over(int peer, uint32_t tag, bool is_outgoing, Memory memory, size_t size) {
  const std::lock_guard lock(mutex_);
  const uint64_t number = next_number_++;
  const BounceBuffer bounce{number, peer, tag, is_outgoing, memory.get(), size};
  fresh_.push_back(bounce);
  entries_.emplace(number, BounceInTransit{bounce, std::move(memory), false});
  if (is_outgoing) ++outgoing_;
  changed_.notify_one();
  return number;
}

void MpiProxy::expect_landings(int64_t change) {
  const std::lock_guard lock(mutex_);
  landings_ += change;
}

void MpiProxy::forget(int peer) {
  const std::lock_guard lock(mutex_);
  std::erase_if(fresh_, [peer](const BounceBuffer& bounce) { return bounce.peer == peer; });
  for (auto at = entries_.begin(); at != entries_.end();) {
    if (at->second.bounce.peer != peer) {
      ++at;
      continue;
    }
    if (at->second.bounce.is_outgoing) --outgoing_;
    if (at->second.is_collected) keep(std::move(at->second.memory));
    at = entries_.erase(at);
  }
  gone_.push_back(peer);
  changed_.notify_one();
}

bool MpiProxy::is_quiet() const {
  const std::lock_guard lock(mutex_);
  return outgoing_ == 0 && landings_ <= 0;
}

void MpiProxy::close() {
  const std::lock_guard lock(mutex_);
  is_closed_ = true;
  changed_.notify_all();
}

MpiProxy::Work MpiProxy::collect(std::chrono::nanoseconds pause) {
  std::unique_lock lock(mutex_);
  const auto has_work = [this] { return is_closed_ || !fresh_.empty() || !gone_.empty(); };
  if (is_pending()) {
    changed_.wait_for(lock, pause, has_work);
  } else {
    changed_.wait(lock, has_work);
  }
  Work work;
  work.bounces.swap(fresh_);
  work.gone.swap(gone_);
  for (const BounceBuffer& bounce : work.bounces) entries_.at(bounce.number).is_collected = true;
  work.is_pending = is_pending();
  work.is_closed = is_closed_;
  return work;
}

std::optional<std::pair<BounceBuffer, MpiProxy::Memory>> MpiProxy::finish(uint64_t number) {
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(number);
  if (found == entries_.end()) return std::nullopt;
  std::pair<BounceBuffer, Memory> done{found->second.bounce, std::move(found->second.memory)};
  entries_.erase(found);
  if (done.first.is_outgoing) --outgoing_;
  return done;
}

}  // namespace multiring
