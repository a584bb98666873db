// Counts the checks of a native test that passed and failed. Any thread may call these functions.
#pragma once

#include <atomic>
#include <cstdio>

namespace multiring::checks {

inline std::atomic<int> passed{0};
inline std::atomic<int> failed{0};

inline void check(bool holds, const char* what) {
  if (holds) {
    ++passed;
    return;
  }
  ++failed;
  std::printf("FAILED: %s\n", what);
}

// Prints the counts and returns the exit status for the test's `main`.
inline int result() {
  std::printf("%d passed, %d failed\n", passed.load(), failed.load());
  return failed == 0 ? 0 : 1;
}

}  // namespace multiring::checks
