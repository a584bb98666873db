#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace multiring {

// A request for rows of equal size from open files. Each row may be followed by a tail.
struct FileRows {
  std::span<const int32_t> descriptors;  // file descriptor of each row
  std::span<const int64_t> begins;       // file offset of each row, in bytes
  size_t row_bytes = 0;                  // size of a row
  std::byte* rows = nullptr;             // memory for all rows, one after another
  std::span<const int64_t> tail_bytes;   // number of bytes to read after each row
  std::byte* tails = nullptr;            // memory for all tails, one after another
};

// Reads the rows in order, with one system call each. Returns the number of complete rows; it stops at the first row
// that is cut short by the end of its file or cannot be read.
size_t read_rows(const FileRows& wanted);

}  // namespace multiring
