// When an operation reduced, in a bounded number of stretches.
#pragma once

#include <utility>
#include <vector>

#include "clock.h"

namespace multiring {

class ReductionTimes {
 public:
  // In which this rank combined, decoded, or wrote a result into others' buffers; short gaps are part of it.
  struct Stretch {
    Clock::time_point start;
    Clock::time_point end;
    Clock::duration busy;
  };

  void add(Clock::time_point start, Clock::time_point end);
  const std::vector<Stretch>& stretches() const { return stretches_; }

 private:
  static constexpr size_t kMost =
      32;  // that an operation keeps; where there are more, those with short gaps become one

  std::vector<Stretch> stretches_;
  Clock::duration joined_ = std::chrono::microseconds(20);  // gaps up to so long belong to a stretch
};

}  // namespace multiring
