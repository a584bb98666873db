#include "mailroom.h"

#include <algorithm>

namespace multiring {
namespace {

constexpr size_t kMostSpare = 64;  // 16 MiB

// What MPI was given and has not given back it may still read or write, until the process ends.
void keep(Mailroom::Memory memory) {
  static std::mutex mutex;
  static auto* const kept = new std::vector<Mailroom::Memory>;  // never destroyed
  const std::lock_guard lock(mutex);
  kept->push_back(std::move(memory));
}

}  // namespace

Mailroom::~Mailroom() {
  for (auto& [number, entry] : entries_) {
    if (entry.is_collected) keep(std::move(entry.memory));
  }
}

Mailroom::Memory Mailroom::memory() {
  const std::lock_guard lock(mutex_);
  if (spare_.empty()) return std::make_unique_for_overwrite<std::byte[]>(kParcelBytes);
  Memory memory = std::move(spare_.back());
  spare_.pop_back();
  return memory;
}

void Mailroom::recycle(Memory memory) {
  const std::lock_guard lock(mutex_);
  if (spare_.size() < kMostSpare) spare_.push_back(std::move(memory));
}

uint64_t Mailroom::hand_over(int peer, uint32_t tag, bool is_outgoing, Memory memory, size_t size) {
  const std::lock_guard lock(mutex_);
  const uint64_t number = next_number_++;
  const Parcel parcel{number, peer, tag, is_outgoing, memory.get(), size};
  fresh_.push_back(parcel);
  entries_.emplace(number, Entry{parcel, std::move(memory), false});
  if (is_outgoing) ++outgoing_;
  changed_.notify_one();
  return number;
}

void Mailroom::expect_landings(int64_t change) {
  const std::lock_guard lock(mutex_);
  landings_ += change;
}

void Mailroom::forget(int peer) {
  const std::lock_guard lock(mutex_);
  std::erase_if(fresh_, [peer](const Parcel& parcel) { return parcel.peer == peer; });
  for (auto at = entries_.begin(); at != entries_.end();) {
    if (at->second.parcel.peer != peer) {
      ++at;
      continue;
    }
    if (at->second.parcel.is_outgoing) --outgoing_;
    if (at->second.is_collected) keep(std::move(at->second.memory));
    at = entries_.erase(at);
  }
  gone_.push_back(peer);
  changed_.notify_one();
}

bool Mailroom::is_quiet() const {
  const std::lock_guard lock(mutex_);
  return outgoing_ == 0 && landings_ <= 0;
}

void Mailroom::close() {
  const std::lock_guard lock(mutex_);
  is_closed_ = true;
  changed_.notify_all();
}

Mailroom::Work Mailroom::collect(std::chrono::nanoseconds pause) {
  std::unique_lock lock(mutex_);
  const auto has_work = [this] { return is_closed_ || !fresh_.empty() || !gone_.empty(); };
  if (is_pending()) {
    changed_.wait_for(lock, pause, has_work);
  } else {
    changed_.wait(lock, has_work);
  }
  Work work;
  work.parcels.swap(fresh_);
  work.gone.swap(gone_);
  for (const Parcel& parcel : work.parcels) entries_.at(parcel.number).is_collected = true;
  work.is_pending = is_pending();
  work.is_closed = is_closed_;
  return work;
}

std::optional<std::pair<Parcel, Mailroom::Memory>> Mailroom::finish(uint64_t number) {
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(number);
  if (found == entries_.end()) return std::nullopt;
  std::pair<Parcel, Memory> done{found->second.parcel, std::move(found->second.memory)};
  entries_.erase(found);
  if (done.first.is_outgoing) --outgoing_;
  return done;
}

}  // namespace multiring
