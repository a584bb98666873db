// What went on when, for whoever asks: the newest events, and all of them while a timeline is kept.
//
// Guarded by RankState::mutex, which every caller holds: whichever thread drives records, callers take.
#pragma once

#include <cstdint>
#include <deque>
#include <type_traits>
#include <utility>
#include <vector>

#include "fault.h"
#include "frame.h"

namespace multiring {

// A row of a timeline as it is: Python reads an array of them (trace/part.py has the same fields).
struct Event {
  enum class Kind : uint32_t { operation, wait, rail, reduce };
  Kind kind;
  uint32_t name;     // rail: which one was given up
  OperationKey key;  // rail: sequence = the peer
  uint64_t bytes;
  int64_t start_ns;   // steady clock
  int64_t agreed_ns;  // operation: when every rank had arrived; 0: never
  int64_t end_ns;
  // Of timelines only.
  uint64_t digest = 0;   // operation: the first bytes of its descriptor's
  int64_t busy_ns = 0;   // reduce: how much of its time was work
  uint32_t thread = 0;   // wait: whose, as the kernel counts threads
  FaultKind fault = FaultKind::none;  // operation
  uint8_t unused[3] = {};
};
static_assert(sizeof(Event) == 80 && std::is_trivially_copyable_v<Event>);

class EventRecorder {
 public:
  void record(const Event& event) {
    if (events_.size() == kMostEvents) {
      events_.pop_front();
      ++dropped_;
    }
    events_.push_back(event);
    keep(event);
  }
  void keep(const Event& event) {  // for the timeline alone
    if (!keeps_) return;
    if (timeline_.size() == kMostOfTimeline) {
      ++dropped_from_timeline_;  // the newest: who reads on has the beginnings of all that he was told of
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
    next.reserve(timeline_.size());  // it may need as much again, and whoever records is not to wait for that
    return std::exchange(timeline_, std::move(next));
  }
  uint64_t dropped_from_timeline() const { return dropped_from_timeline_; }  // since keep_timeline
  uint32_t this_thread() const;  // the caller's, where a timeline is kept; else 0

 private:
  static constexpr size_t kMostEvents = 1 << 16;
  // 80 MB: what a group of one rank does in a second or so, and somebody drains it more often.
  static constexpr size_t kMostOfTimeline = 1 << 20;

  std::deque<Event> events_;  // the newest
  uint64_t dropped_ = 0;
  bool keeps_ = false;
  std::vector<Event> timeline_;
  uint64_t dropped_from_timeline_ = 0;
};

}  // namespace multiring
