// Memory of the stand-in devices, and host memory that is pinned or registered.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

namespace standin {

// The memory of one device. It is a file in memory that is mapped twice. The program sees the mapping without access
// rights, so a host access crashes. Streams use the other mapping.
class DeviceMemory {
 public:
  explicit DeviceMemory(size_t bytes);
  DeviceMemory(int file, size_t bytes);  // of another process

  // Returns null if there is no room. The new memory is filled with 0xff, which is NaN (of a large block, the start).
  void* allocate(size_t bytes);
  bool release(void* address);   // false if no block starts there
  bool sees(const void* address) const;
  bool holds(const void* address, size_t bytes) const;  // whether all bytes lie in one allocated block
  void* reached(const void* address) const;             // the address at which streams find the memory
  size_t bytes() const { return bytes_; }

  // For handles that another process opens.
  int file() const { return file_; }
  bool find(const void* address, size_t* offset, size_t* bytes) const;  // the block that holds the address
  void* open(size_t offset, size_t bytes);                              // lets the block be used until as many `close`
  bool close(const void* address);
  size_t used() const;

 private:
  void spoil(size_t offset, size_t bytes);
  void map();

  size_t bytes_;
  int file_;
  char* seen_;
  char* reached_;
  mutable std::mutex mutex_;
  std::map<size_t, size_t> blocks_;  // offset and size of each allocated block
  size_t used_ = 0;
  std::map<size_t, int> opened_;  // how often, by offset
};

// Ranges of page-locked host memory.
class PinnedRanges {
 public:
  void* allocate(size_t bytes);
  int release(void* address);
  int add(void* address, size_t bytes, bool is_read_only);
  int remove(void* address);
  bool cover(const void* address, size_t bytes) const;

 private:
  struct Range {
    size_t bytes;
    bool is_own;  // whether `allocate` made it
  };
  bool overlaps(uintptr_t start, size_t bytes) const;

  mutable std::mutex mutex_;
  std::map<uintptr_t, Range> ranges_;
};

}  // namespace standin
