// How long two processes take to wake each other in turn: ./futex_ping_pong ROUNDS prints nanoseconds for there and back.
#include <linux/futex.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static void pass_on(uint32_t* word, uint32_t value) {
  __atomic_store_n(word, value, __ATOMIC_SEQ_CST);
  syscall(SYS_futex, word, FUTEX_WAKE, 1, NULL, NULL, 0);
}

static void await(uint32_t* word, uint32_t value) {
  for (uint32_t seen; (seen = __atomic_load_n(word, __ATOMIC_SEQ_CST)) != value;) {
    syscall(SYS_futex, word, FUTEX_WAIT, seen, NULL, NULL, 0);
  }
}

int main(int count, char** arguments) {
  const uint32_t rounds = count > 1 ? (uint32_t)atoi(arguments[1]) : 10000;
  uint32_t* words = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (words == MAP_FAILED) return 1;
  uint32_t* there = words;
  uint32_t* back = words + 64;  // a cache line of its own
  const pid_t child = fork();
  if (child < 0) return 1;
  if (child == 0) {
    for (uint32_t i = 1; i <= rounds; ++i) {
      await(there, i);
      pass_on(back, i);
    }
    _exit(0);
  }
  struct timespec start, end;
  clock_gettime(CLOCK_MONOTONIC, &start);
  for (uint32_t i = 1; i <= rounds; ++i) {
    pass_on(there, i);
    await(back, i);
  }
  clock_gettime(CLOCK_MONOTONIC, &end);
  waitpid(child, NULL, 0);
  const double took_ns = (double)(end.tv_sec - start.tv_sec) * 1e9 + (double)(end.tv_nsec - start.tv_nsec);
  printf("%.1f\n", took_ns / rounds);
  return 0;
}
