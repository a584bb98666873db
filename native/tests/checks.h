// What a native test counts: checks that held, and those that did not, from any thread.
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

// Prints the counts, and returns what the test's `main` is to return.
inline int result() {
  std::printf("%d passed, %d failed\n", passed.load(), failed.load());
  return failed == 0 ? 0 : 1;
}

}  // namespace multiring::checks
