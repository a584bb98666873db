#include "stream.h"

#include <algorithm>
#include <thread>
#include <utility>
#include <vector>

#include "codes.h"

namespace standin {
namespace {

std::atomic<uint64_t> streams_made{0};

}  // namespace

void Mark::set() {
  const std::lock_guard lock(mutex_);
  is_set_ = true;
  when_ = Clock::now();
  changed_.notify_all();
}

void Mark::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return is_set_; });
}

bool Mark::is_set() {
  const std::lock_guard lock(mutex_);
  return is_set_;
}

Mark::Clock::time_point Mark::when() {
  const std::lock_guard lock(mutex_);
  return when_;
}

Stream::Stream(int device, unsigned flags, int priority)
    : device_(device), flags_(flags), priority_(priority), number_(streams_made++) {}

MarkPointer Stream::push(Work work, bool is_late) {
  auto mark = std::make_shared<Mark>();
  const std::lock_guard lock(mutex_);
  if (!has_thread_) {
    has_thread_ = true;
    std::thread([self = shared_from_this()] { self->run(); }).detach();
  }
  queue_.emplace_back(
      [work = std::move(work), mark] {
        work();
        mark->set();
      },
      is_late);
  last_ = mark;
  changed_.notify_one();
  return mark;
}

MarkPointer Stream::last() {
  const std::lock_guard lock(mutex_);
  return last_;
}

bool Stream::is_idle() {
  const MarkPointer mark = last();
  return mark == nullptr || mark->is_set();
}

void Stream::end() {
  const std::lock_guard lock(mutex_);
  ends_ = true;
  changed_.notify_one();
}

void Stream::run() {
  // The delays depend only on the seed and on the order in which the program makes its streams.
  std::mt19937_64 random(static_cast<uint64_t>(setting("STANDIN_SEED", 1)) * 1000003 + number_);
  const long longest_us = std::max(1L, setting("STANDIN_DELAY_US", 200));
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return !queue_.empty() || ends_; });
    if (queue_.empty()) return;
    auto [work, is_late] = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    if (is_late) std::this_thread::sleep_for(std::chrono::microseconds(random() % longest_us + 1));
    work();
    work = nullptr;  // frees what the work held before the lock is taken again
    lock.lock();
  }
}

DeviceStreams::DeviceStreams(int device) : legacy_(std::make_shared<Stream>(device, 0, 0)) {}

StreamPointer DeviceStreams::make(unsigned flags, int priority) {
  auto made = std::make_shared<Stream>(legacy_->device(), flags, priority);
  const std::lock_guard lock(mutex_);
  streams_.insert(made);
  return made;
}

bool DeviceStreams::drop(Stream* stream) {
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(streams_.begin(), streams_.end(), [=](auto& each) { return each.get() == stream; });
  if (found == streams_.end()) return false;
  (*found)->end();
  streams_.erase(found);
  return true;
}

bool DeviceStreams::has(Stream* stream) {
  const std::lock_guard lock(mutex_);
  return std::any_of(streams_.begin(), streams_.end(), [=](auto& each) { return each.get() == stream; });
}

MarkPointer DeviceStreams::push(const StreamPointer& stream, Work work, bool is_work) {
  const std::lock_guard lock(mutex_);
  std::vector<MarkPointer> before;
  if (stream == legacy_) {
    for (const auto& each : streams_)
      if (each->waits_for_legacy()) before.push_back(each->last());
  } else if (stream->waits_for_legacy() && is_work) {
    before.push_back(legacy_->last());
  }
  std::erase_if(before, [](const MarkPointer& mark) { return mark == nullptr || mark->is_set(); });
  if (work == nullptr && before.empty() && stream->is_idle()) {  // there is nothing to wait for
    auto mark = std::make_shared<Mark>();
    mark->set();
    return mark;
  }
  return stream->push(
      [before = std::move(before), work = std::move(work)] {
        for (const auto& each : before) each->wait();
        if (work) work();
      },
      is_work);
}

void DeviceStreams::wait() {
  std::vector<MarkPointer> marks;
  {
    const std::lock_guard lock(mutex_);
    marks.push_back(legacy_->last());
    for (const auto& each : streams_) marks.push_back(each->last());
  }
  for (const auto& each : marks)
    if (each != nullptr) each->wait();
}

}  // namespace standin
