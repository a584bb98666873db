// Streams and events. A stream is a thread that does the stream's work in order, and starts each piece late.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>

namespace standin {

// The end of one piece of a stream's work.
class Mark {
 public:
  using Clock = std::chrono::steady_clock;
  void set();
  void wait();
  bool is_set();
  Clock::time_point when();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_set_ = false;
  Clock::time_point when_;
};
using MarkPointer = std::shared_ptr<Mark>;
using Work = std::function<void()>;

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  Stream(int device, unsigned flags, int priority);
  int device() const { return device_; }
  unsigned flags() const { return flags_; }
  int priority() const { return priority_; }
  bool waits_for_legacy() const { return (flags_ & 1) == 0; }

  MarkPointer push(Work work, bool is_late);
  MarkPointer last();  // the mark of the newest piece; null if there was none
  bool is_idle();
  void end();  // the thread ends after the work that is queued

 private:
  void run();

  const int device_;
  const unsigned flags_;
  const int priority_;
  const uint64_t number_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<Work, bool>> queue_;
  MarkPointer last_;
  bool has_thread_ = false;
  bool ends_ = false;
};
using StreamPointer = std::shared_ptr<Stream>;

// The streams of one device, and the order between its legacy stream and its blocking streams.
class DeviceStreams {
 public:
  explicit DeviceStreams(int device);
  const StreamPointer& legacy() const { return legacy_; }
  StreamPointer make(unsigned flags, int priority);
  bool drop(Stream* stream);
  bool has(Stream* stream);
  // Work on a blocking stream waits for earlier work of the legacy stream; anything on the legacy stream waits for
  // earlier work of all blocking streams. The recording of an event (`is_work` false) does not wait for the legacy
  // stream: the H100 recorded in benchmarks/results did neither.
  MarkPointer push(const StreamPointer& stream, Work work, bool is_work);
  void wait();  // for all streams

 private:
  std::mutex mutex_;
  StreamPointer legacy_;
  std::set<StreamPointer> streams_;
};

class Capture;

struct Event {
  int device = 0;
  unsigned flags = 0;
  std::mutex mutex;
  MarkPointer mark;  // of the latest recording
  std::shared_ptr<Capture> capture;  // in which it was recorded last, if it was in one
  std::map<const Stream*, size_t> before;  // the capture's calls before it
  MarkPointer recorded() {
    const std::lock_guard lock(mutex);
    return mark;
  }
};

}  // namespace standin
