// The times at which an operation reduced, as a bounded number of intervals.
#pragma once

#include <utility>
#include <vector>

#include "memory/clock.h"

namespace multiring {

class ReductionTimes {
 public:
  // An interval in which this rank combined, decoded, or wrote results into other ranks' buffers. It includes short
  // gaps; `busy` is the time without them.
  struct Stretch {
    Clock::time_point start;
    Clock::time_point end;
    Clock::duration busy;
  };

  void add(Clock::time_point start, Clock::time_point end);
  const std::vector<Stretch>& stretches() const { return stretches_; }

 private:
  // The most intervals of an operation. If there are more, intervals with short gaps between them are merged.
  static constexpr size_t kMost = 32;

  std::vector<Stretch> stretches_;
  Clock::duration joined_ = std::chrono::microseconds(20);  // the longest gap within an interval
};

}  // namespace multiring
