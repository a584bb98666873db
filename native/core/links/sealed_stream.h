// A byte stream over a socket, sealed in records of at most kRecordBytes.
//
// A record is its size (4 bytes), its encrypted bytes and its tag. The size is authenticated too. Bytes leave `read`
// only after their whole record has been authenticated, so unauthenticated bytes never reach the program's memory.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "seal.h"

namespace multiring {

class SealedStream {
 public:
  static constexpr size_t kRecordBytes = 64 * 1024;
  static constexpr size_t kHeadBytes = 4;

  explicit SealedStream(SealPair seals);

  // Like ::sendmsg: returns the number of bytes that were taken, or -1 with errno. The bytes are encrypted and no
  // longer needed, but the kernel may not have accepted all of them: then `pending` is above 0, and `flush` must follow.
  ssize_t write(int socket, std::span<const iovec> parts);
  bool flush(int socket);  // sends pending bytes; returns false with errno if some are left
  size_t pending() const { return out_to_ - out_from_; }
  uint64_t produced() const { return produced_; }  // encrypted bytes so far, including pending ones

  // Like ::readv: returns the number of authenticated bytes, 0 at the end of the connection, or -1 with errno. EBADMSG
  // means that what came is not what the peer sent; `why` describes it.
  ssize_t read(int socket, std::span<const iovec> parts);
  const std::string& why() const { return why_; }
  // True if the next `read` needs no system call. No poller reports these bytes.
  bool holds() const { return plain_from_ < plain_to_ || has_record(); }
  bool may_have_more() const { return !is_drained_; }  // false if the last system call took all bytes that had come

 private:
  static constexpr size_t kMostBytes = kHeadBytes + kRecordBytes + Seal::kTagBytes;
  static constexpr size_t kInBytes = 4 * kMostBytes;

  uint32_t next_size() const;
  bool has_record() const;
  bool open_record();
  ssize_t fill(int socket);
  ssize_t fail(std::string why);

  SealPair seals_;
  std::vector<std::byte> out_;
  size_t out_from_ = 0;
  size_t out_to_ = 0;
  uint64_t produced_ = 0;
  std::vector<std::byte> in_;
  size_t plain_from_ = 0;  // decrypted bytes that were not read yet
  size_t plain_to_ = 0;
  size_t in_from_ = 0;  // encrypted bytes
  size_t in_to_ = 0;
  uint64_t opened_ = 0;  // records
  bool is_drained_ = true;
  std::string why_;
};

}  // namespace multiring
