#include "file_rows.h"

#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <cerrno>

namespace multiring {
namespace {

// Reads `parts` from file offset `place` on, with further calls after short reads. Returns false if they are
// incomplete.
bool read_all(int descriptor, std::array<iovec, 2> parts, int64_t place) {
  while (parts[0].iov_len + parts[1].iov_len > 0) {
    const ssize_t got = preadv(descriptor, parts.data(), 2, place);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    place += got;
    size_t left = static_cast<size_t>(got);
    for (iovec& part : parts) {
      const size_t here = left < part.iov_len ? left : part.iov_len;
      part.iov_base = static_cast<std::byte*>(part.iov_base) + here;
      part.iov_len -= here;
      left -= here;
    }
  }
  return true;
}

}  // namespace

size_t read_rows(const FileRows& wanted) {
  std::byte* row = wanted.rows;
  std::byte* tail = wanted.tails;
  for (size_t i = 0; i < wanted.begins.size(); ++i) {
    const auto behind = static_cast<size_t>(wanted.tail_bytes[i]);
    const std::array<iovec, 2> parts{iovec{row, wanted.row_bytes}, iovec{tail, behind}};
    if (!read_all(wanted.descriptors[i], parts, wanted.begins[i])) return i;
    row += wanted.row_bytes;
    tail += behind;
  }
  return wanted.begins.size();
}

}  // namespace multiring
