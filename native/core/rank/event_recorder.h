// Records events: always the newest ones, and all events while a timeline is recorded.
//
// RankState::mutex guards the state, and every caller holds it. The driving thread records events; callers take them.
#pragma once

#include <cstdint>
#include <deque>
#include <type_traits>
#include <utility>
#include <vector>

#include "memory/fault.h"
#include "memory/frame.h"

namespace multiring {

enum class EventKind : uint32_t { operation, wait, rail, reduce };

// One row of a timeline. Python reads an array of these rows; trace/part.py must declare the same fields.
struct Event {
  EventKind kind;
  uint32_t name;     // operation: the number of its name; rail: the index of the lost rail
  OperationKey key;  // operation: its key; rail: `sequence` is the peer
  uint64_t bytes;
  int64_t start_ns;   // steady clock
  int64_t agreed_ns;  // operation: when every rank had arrived; 0 if that did not happen
  int64_t end_ns;
  // The following fields are used by timelines only.
  uint64_t digest = 0;   // operation: the first 8 bytes of its descriptor's digest
  int64_t busy_ns = 0;   // reduce: the working time between start_ns and end_ns
  uint32_t thread = 0;   // wait: the kernel's id of the waiting thread
  FaultKind fault = FaultKind::none;  // operation: how it failed, or none
  uint8_t unused[3] = {};
};
static_assert(sizeof(Event) == 80 && std::is_trivially_copyable_v<Event>);

class EventRecorder {
 public:
  void record(const Event& event) {  // records an event; drops the oldest if there are too many
    if (events_.size() == kMostEvents) {
      events_.pop_front();
      ++dropped_;
    }
    events_.push_back(event);
    keep(event);
  }
  void keep(const Event& event) {  // records an event in the timeline only
    if (!keeps_) return;
    if (timeline_.size() == kMostOfTimeline) {
      ++dropped_from_timeline_;  // drops the newest event, so a reader of the timeline misses only its end
      return;
    }
    timeline_.push_back(event);
  }

  std::vector<Event> take() {
    const auto taken = std::exchange(events_, {});
    return {taken.begin(), taken.end()};
  }
  uint64_t dropped() const { return dropped_; }

  bool keeps_timeline() const { return keeps_; }
  void keep_timeline(bool keeps) {
    if (keeps) {
      timeline_.clear();
      dropped_from_timeline_ = 0;
    }
    keeps_ = keeps;
  }
  std::vector<Event> take_timeline() {
    std::vector<Event> next;
    next.reserve(timeline_.size());  // the next part may grow as long; the recording thread must not wait for memory
    return std::exchange(timeline_, std::move(next));
  }
  uint64_t dropped_from_timeline() const { return dropped_from_timeline_; }  // events dropped since keep_timeline
  uint32_t this_thread() const;  // the kernel's id of the calling thread; 0 unless a timeline is recorded

 private:
  static constexpr size_t kMostEvents = 1 << 16;
  // 80 MB hold the events of about one second of a group with one rank. The reader drains the timeline more often.
  static constexpr size_t kMostOfTimeline = 1 << 20;

  std::deque<Event> events_;  // the newest events
  uint64_t dropped_ = 0;
  bool keeps_ = false;
  std::vector<Event> timeline_;
  uint64_t dropped_from_timeline_ = 0;
};

}  // namespace multiring
