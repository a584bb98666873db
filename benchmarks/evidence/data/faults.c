// Fails, stops or kills at the n-th call of one kind below one folder, or records what is changed there: loaded before
// libc by faults.py, crashes.py and benchmarks/evidence/checkpoints/main.py.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char folder[512], kind[32];
static int wanted_at, wanted_errno;  // errno 0: killed; -1: stopped, until somebody has it go on
static int is_lasting;               // whether all calls from the n-th on fail
static atomic_int seen, fired;

void fault_arm(const char *where, const char *call, int at, int error) {
  snprintf(folder, sizeof folder, "%s", where);
  snprintf(kind, sizeof kind, "%s", call);
  wanted_at = at;
  wanted_errno = error;
  seen = fired = is_lasting = 0;
}

void fault_last(void) { is_lasting = 1; }

int fault_fired(void) { return fired; }
int fault_seen(void) { return seen; }

// Of the kind "change" is every call that changes something: all of these, but for opening what is there to read it.
static int is_wanted(const char *call) {
  return kind[0] && (!strcmp(kind, call) || (!strcmp(kind, "change") && strcmp(call, "read")));
}

static int fails(const char *call, const char *path) {
  if (!is_wanted(call) || strncmp(path, folder, strlen(folder))) return 0;
  const int number = atomic_fetch_add(&seen, 1) + 1;
  if (is_lasting ? number < wanted_at : number != wanted_at) return 0;
  fired = 1;
  if (!wanted_errno) raise(SIGKILL);
  if (wanted_errno < 0) {
    raise(SIGSTOP);
    return 0;
  }
  errno = wanted_errno;
  return 1;
}

static int fails_open(const char *path, int flags) {
  if (!strcmp(kind, "open")) return fails("open", path);
  return fails(flags & (O_CREAT | O_TRUNC | O_WRONLY | O_RDWR) ? "open" : "read", path);
}

static int fails_at(const char *call, int descriptor) {
  if (!is_wanted(call)) return 0;
  char link[64], path[512];
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t size = readlink(link, path, sizeof path - 1);
  if (size < 0) return 0;
  path[size] = 0;
  return fails(call, path);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int record = -1;  // a descriptor
static char recorded[512];
static pthread_mutex_t in_order = PTHREAD_MUTEX_INITIALIZER;

void record_below(const char *where, int descriptor) {
  snprintf(recorded, sizeof recorded, "%s", where);
  record = descriptor;
}

static int begin(void) { return record >= 0 && !pthread_mutex_lock(&in_order); }
static void end(int begun) {
  if (begun) pthread_mutex_unlock(&in_order);
}

// A line "call path other offset size", and `size` bytes.
static void note(const char *call, const char *path, const char *other, long offset, const void *data, size_t size) {
  if (record < 0 || strncmp(path, recorded, strlen(recorded))) return;
  char line[1200];
  int length = snprintf(line, sizeof line, "%s\t%s\t%s\t%ld\t%zu\n", call, path, other, offset, size);
  REAL(write)(record, line, (size_t)length);
  for (size_t done = 0; done < size;) done += (size_t)REAL(write)(record, (const char *)data + done, size - done);
}

static void note_at(const char *call, int descriptor, long offset, const void *data, size_t size) {
  char place[64], path[512];
  snprintf(place, sizeof place, "/proc/self/fd/%d", descriptor);
  ssize_t length = readlink(place, path, sizeof path - 1);
  if (length < 0) return;
  path[length] = 0;
  note(call, path, "", offset, data, size);
}

static int opened(int found, const char *path, int flags) {
  if (found >= 0 && (flags & (O_CREAT | O_TRUNC))) note(flags & O_TRUNC ? "truncate" : "create", path, "", 0, "", 0);
  return found;
}

#define MODE(flags)                          \
  mode_t mode = 0;                           \
  if ((flags) & (O_CREAT | O_TMPFILE)) {     \
    va_list rest;                            \
    va_start(rest, flags);                   \
    mode = va_arg(rest, mode_t);             \
    va_end(rest);                            \
  }

int open(const char *path, int flags, ...) {
  MODE(flags)
  if (fails_open(path, flags)) return -1;
  const int begun = begin();
  const int found = opened(REAL(open)(path, flags, mode), path, flags);
  end(begun);
  return found;
}
int open64(const char *path, int flags, ...) {
  MODE(flags)
  if (fails_open(path, flags)) return -1;
  const int begun = begin();
  const int found = opened(REAL(open64)(path, flags, mode), path, flags);
  end(begun);
  return found;
}
int openat(int at, const char *path, int flags, ...) {
  MODE(flags)
  if (fails_open(path, flags)) return -1;
  const int begun = begin();
  const int found = opened(REAL(openat)(at, path, flags, mode), path, flags);
  end(begun);
  return found;
}
int openat64(int at, const char *path, int flags, ...) {
  MODE(flags)
  if (fails_open(path, flags)) return -1;
  const int begun = begin();
  const int found = opened(REAL(openat64)(at, path, flags, mode), path, flags);
  end(begun);
  return found;
}
ssize_t write(int descriptor, const void *data, size_t size) {
  if (fails_at("write", descriptor)) return -1;
  const int begun = begin();
  const long offset = begun ? (long)lseek(descriptor, 0, SEEK_CUR) : 0;
  const ssize_t found = REAL(write)(descriptor, data, size);
  if (begun && found > 0) note_at("write", descriptor, offset, data, (size_t)found);
  end(begun);
  return found;
}
int fsync(int descriptor) {
  if (fails_at("fsync", descriptor)) return -1;
  const int begun = begin();
  const int found = REAL(fsync)(descriptor);
  if (!found) note_at("fsync", descriptor, 0, "", 0);
  end(begun);
  return found;
}

// Calls of paths: what they are, what is done, and how it is noted.
#define CALL(kind, path, real, name, other)         \
  if (fails(kind, path)) return -1;                 \
  const int begun = begin();                        \
  const int found = real;                           \
  if (!found) note(name, path, other, 0, "", 0);    \
  end(begun);                                       \
  return found;

int rename(const char *from, const char *to) { CALL("rename", from, REAL(rename)(from, to), "rename", to) }
int renameat(int a, const char *from, int b, const char *to) {
  CALL("rename", from, REAL(renameat)(a, from, b, to), "rename", to)
}
int link(const char *from, const char *to) { CALL("link", from, REAL(link)(from, to), "link", to) }
int unlink(const char *path) { CALL("unlink", path, REAL(unlink)(path), "unlink", "") }
int unlinkat(int at, const char *path, int flags) {
  CALL("unlink", path, REAL(unlinkat)(at, path, flags), flags ? "rmdir" : "unlink", "")
}
int mkdir(const char *path, mode_t mode) { CALL("mkdir", path, REAL(mkdir)(path, mode), "mkdir", "") }
int rmdir(const char *path) { CALL("rmdir", path, REAL(rmdir)(path), "rmdir", "") }
