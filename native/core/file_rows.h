#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace multiring {

// Rows of open files, all of a size, each with what follows it.
struct FileRows {
  std::span<const int32_t> descriptors;  // of each row's file
  std::span<const int64_t> begins;       // where each row begins in its file
  size_t row_bytes = 0;                  // of each
  std::byte* rows = nullptr;             // for all of them, one after the other
  std::span<const int64_t> tail_bytes;   // how many bytes behind each row are wanted, too
  std::byte* tails = nullptr;            // for those
};

// Reads row after row, one system call each. Returns how many came whole: fewer than there are where a file ends
// before, or cannot be read.
size_t read_rows(const FileRows& wanted);

}  // namespace multiring
