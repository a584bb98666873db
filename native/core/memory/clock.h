// The clock that all deadlines and time stamps of the core use.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace multiring {

using Clock = std::chrono::steady_clock;

// Returns the nanoseconds since the clock's epoch; 0 for the default time point, which means "never".
inline int64_t nanoseconds(Clock::time_point at) {
  return at == Clock::time_point{}
             ? 0
             : std::chrono::duration_cast<std::chrono::nanoseconds>(at.time_since_epoch()).count();
}

inline Clock::duration as_duration(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::min(seconds, 1e9)));
}

inline double seconds_since(Clock::time_point at) {
  return std::chrono::duration<double>(Clock::now() - at).count();
}

}  // namespace multiring
