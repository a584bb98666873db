// Fails or kills at the n-th call of one kind below one folder: loaded before libc by evidence_data_faults.py.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char folder[512], kind[32];
static int wanted_at, wanted_errno;  // errno 0: killed
static atomic_int seen, fired;

void fault_arm(const char *where, const char *call, int at, int error) {
  snprintf(folder, sizeof folder, "%s", where);
  snprintf(kind, sizeof kind, "%s", call);
  wanted_at = at;
  wanted_errno = error;
  seen = fired = 0;
}

int fault_fired(void) { return fired; }

static int fails(const char *call, const char *path) {
  if (!kind[0] || strcmp(kind, call) || strncmp(path, folder, strlen(folder))) return 0;
  if (atomic_fetch_add(&seen, 1) + 1 != wanted_at) return 0;
  fired = 1;
  if (!wanted_errno) raise(SIGKILL);
  errno = wanted_errno;
  return 1;
}

static int fails_at(const char *call, int descriptor) {
  if (!kind[0] || strcmp(kind, call)) return 0;
  char link[64], path[512];
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t size = readlink(link, path, sizeof path - 1);
  if (size < 0) return 0;
  path[size] = 0;
  return fails(call, path);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
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
  return fails("open", path) ? -1 : REAL(open)(path, flags, mode);
}
int open64(const char *path, int flags, ...) {
  MODE(flags)
  return fails("open", path) ? -1 : REAL(open64)(path, flags, mode);
}
int openat(int at, const char *path, int flags, ...) {
  MODE(flags)
  return fails("open", path) ? -1 : REAL(openat)(at, path, flags, mode);
}
int openat64(int at, const char *path, int flags, ...) {
  MODE(flags)
  return fails("open", path) ? -1 : REAL(openat64)(at, path, flags, mode);
}
ssize_t write(int descriptor, const void *data, size_t size) {
  return fails_at("write", descriptor) ? -1 : REAL(write)(descriptor, data, size);
}
int fsync(int descriptor) { return fails_at("fsync", descriptor) ? -1 : REAL(fsync)(descriptor); }
int rename(const char *from, const char *to) { return fails("rename", from) ? -1 : REAL(rename)(from, to); }
int renameat(int a, const char *from, int b, const char *to) {
  return fails("rename", from) ? -1 : REAL(renameat)(a, from, b, to);
}
int link(const char *from, const char *to) { return fails("link", from) ? -1 : REAL(link)(from, to); }
int unlink(const char *path) { return fails("unlink", path) ? -1 : REAL(unlink)(path); }
int unlinkat(int at, const char *path, int flags) {
  return fails("unlink", path) ? -1 : REAL(unlinkat)(at, path, flags);
}
int mkdir(const char *path, mode_t mode) { return fails("mkdir", path) ? -1 : REAL(mkdir)(path, mode); }
