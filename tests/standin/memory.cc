#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <iterator>

#include "codes.h"

namespace standin {
namespace {

constexpr size_t kAlignment = 512;
constexpr size_t kFilled = 64 << 20;  // bytes of a block that are filled

size_t rounded(size_t bytes) { return (std::max<size_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment; }

char* mapped(int file, size_t bytes, int rights) {
  void* found = ::mmap(nullptr, bytes, rights, MAP_SHARED | MAP_NORESERVE, file, 0);
  if (found == MAP_FAILED) {
    std::perror("stand-in: mapping device memory");
    std::abort();
  }
  return static_cast<char*>(found);
}

// Returns the rights of the mapping that holds `address`, as in /proc/self/maps; 0 if all bytes are not mapped.
int rights_of(uintptr_t address, size_t bytes) {
  std::FILE* maps = std::fopen("/proc/self/maps", "r");
  if (maps == nullptr) return 0;
  char line[512];
  int found = 0;
  uintptr_t next = address;
  while (std::fgets(line, sizeof line, maps) != nullptr && next < address + bytes) {
    unsigned long start = 0;
    unsigned long end = 0;
    char rights[5] = {};
    if (std::sscanf(line, "%lx-%lx %4s", &start, &end, rights) != 3 || next < start || next >= end) continue;
    const int own = (rights[0] == 'r' ? PROT_READ : 0) | (rights[1] == 'w' ? PROT_WRITE : 0);
    found = next == address ? own : found & own;
    next = end;
  }
  std::fclose(maps);
  return next < address + bytes ? 0 : found;
}

}  // namespace

DeviceMemory::DeviceMemory(size_t bytes) : bytes_(bytes) {
  file_ = ::memfd_create("standin", MFD_CLOEXEC);
  if (file_ < 0 || ::ftruncate(file_, static_cast<off_t>(bytes)) != 0) {
    std::perror("stand-in: making device memory");
    std::abort();
  }
  map();
}

DeviceMemory::DeviceMemory(int file, size_t bytes) : bytes_(bytes), file_(file) { map(); }

void DeviceMemory::map() {
  seen_ = mapped(file_, bytes_, PROT_NONE);
  reached_ = mapped(file_, bytes_, PROT_READ | PROT_WRITE);
}

bool DeviceMemory::find(const void* address, size_t* offset, size_t* bytes) const {
  if (!holds(address, 1)) return false;
  const std::lock_guard lock(mutex_);
  const auto block = std::prev(blocks_.upper_bound(static_cast<const char*>(address) - seen_));
  *offset = block->first;
  *bytes = block->second;
  return true;
}

void* DeviceMemory::open(size_t offset, size_t bytes) {
  const std::lock_guard lock(mutex_);
  blocks_[offset] = bytes;
  ++opened_[offset];
  return seen_ + offset;
}

bool DeviceMemory::close(const void* address) {
  const std::lock_guard lock(mutex_);
  const size_t offset = static_cast<const char*>(address) - seen_;
  const auto found = opened_.find(offset);
  if (!sees(address) || found == opened_.end()) return false;
  if (--found->second != 0) return true;
  opened_.erase(found);
  blocks_.erase(offset);
  return true;
}

// Takes the values out of a block, and the pages of a large one.
void DeviceMemory::spoil(size_t offset, size_t bytes) {
  const size_t filled = std::min(bytes, kFilled);
  std::memset(reached_ + offset, 0xff, filled);
  if (filled == bytes) return;
  ::fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset + filled),
              static_cast<off_t>(bytes - filled));
}

void* DeviceMemory::allocate(size_t bytes) {
  const size_t want = rounded(bytes);
  const std::lock_guard lock(mutex_);
  size_t start = 0;
  for (const auto& [offset, size] : blocks_) {
    if (offset - start >= want) break;
    start = offset + size;
  }
  if (want > bytes_ || start > bytes_ - want) return nullptr;
  blocks_[start] = want;
  used_ += want;
  spoil(start, want);
  return seen_ + start;
}

bool DeviceMemory::release(void* address) {
  const std::lock_guard lock(mutex_);
  const auto found = sees(address) ? blocks_.find(static_cast<char*>(address) - seen_) : blocks_.end();
  if (found == blocks_.end()) return false;
  spoil(found->first, found->second);
  used_ -= found->second;
  blocks_.erase(found);
  return true;
}

bool DeviceMemory::sees(const void* address) const {
  return address >= static_cast<const void*>(seen_) && address < static_cast<const void*>(seen_ + bytes_);
}

bool DeviceMemory::holds(const void* address, size_t bytes) const {
  if (!sees(address)) return false;
  const size_t offset = static_cast<const char*>(address) - seen_;
  const std::lock_guard lock(mutex_);
  const auto after = blocks_.upper_bound(offset);
  if (after == blocks_.begin()) return false;
  const auto [start, size] = *std::prev(after);
  return offset + bytes <= start + size;
}

void* DeviceMemory::reached(const void* address) const {
  return reached_ + (static_cast<const char*>(address) - seen_);
}

size_t DeviceMemory::used() const {
  const std::lock_guard lock(mutex_);
  return used_;
}

void* PinnedRanges::allocate(size_t bytes) {
  bytes = std::max<size_t>(bytes, 1);
  void* made = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) return nullptr;
  const std::lock_guard lock(mutex_);
  ranges_[reinterpret_cast<uintptr_t>(made)] = {bytes, true};
  return made;
}

int PinnedRanges::release(void* address) {
  const std::lock_guard lock(mutex_);
  const auto found = ranges_.find(reinterpret_cast<uintptr_t>(address));
  if (found == ranges_.end() || !found->second.is_own) return kInvalidValue;
  ::munmap(address, found->second.bytes);
  ranges_.erase(found);
  return kOk;
}

int PinnedRanges::add(void* address, size_t bytes, bool is_read_only) {
  const auto start = reinterpret_cast<uintptr_t>(address);
  if (address == nullptr || bytes == 0) return kInvalidValue;
  const int rights = rights_of(start, bytes);
  if ((rights & PROT_READ) == 0 || ((rights & PROT_WRITE) == 0 && !is_read_only)) return kInvalidValue;
  const std::lock_guard lock(mutex_);
  if (overlaps(start, bytes)) return kAlreadyRegistered;
  ranges_[start] = {bytes, false};
  return kOk;
}

int PinnedRanges::remove(void* address) {
  const auto start = reinterpret_cast<uintptr_t>(address);
  const std::lock_guard lock(mutex_);
  const auto found = ranges_.find(start);
  if (found != ranges_.end() && !found->second.is_own) {
    ranges_.erase(found);
    return kOk;
  }
  return overlaps(start, 1) ? kInvalidValue : kNotRegistered;
}

bool PinnedRanges::cover(const void* address, size_t bytes) const {
  const auto start = reinterpret_cast<uintptr_t>(address);
  const std::lock_guard lock(mutex_);
  const auto after = ranges_.upper_bound(start);
  return after != ranges_.begin() && start + bytes <= std::prev(after)->first + std::prev(after)->second.bytes;
}

bool PinnedRanges::overlaps(uintptr_t start, size_t bytes) const {
  const auto after = ranges_.lower_bound(start + bytes);
  return after != ranges_.begin() && start < std::prev(after)->first + std::prev(after)->second.bytes;
}

}  // namespace standin
