// Pages of the arena behind memory that somebody else allocated, who notices nothing: what ordinary memory that comes
// again and again is given, so that the ranks of the host read and write it in place.
//
// The bytes move into a block of the segment, and the block's pages are mapped a second time, where the bytes were. Of
// the first and the last page others may own a part: what lies there is copied before and after each operation, and
// their pages stay. Whoever allocated the memory keeps it for as long as it is backed (torch/backend/backing.py).
#pragma once

#include <cstddef>
#include <memory>

#include "segment.h"

namespace multiring {

class Backing {
 public:
  // Throws Fault (state) where `bytes` at `address` are not private memory of no file, and (argument) where they hold
  // no whole page, or half of the segment is in use. Nobody else writes them meanwhile.
  Backing(std::shared_ptr<Segment> segment, std::byte* address, size_t bytes);
  ~Backing();
  Backing(const Backing&) = delete;
  Backing& operator=(const Backing&) = delete;

  std::byte* place() const { return place_; }  // where the same bytes lie in the arena
  // Whether the memory still is the block's: it changes a byte for a moment to know, of which nobody else has use now.
  bool stands() const;
  void fill() const;   // what is not on whole pages, into the arena
  void empty() const;  // and back
  // Gives the memory pages of its own again. With `keep` they hold what they held, whatever other threads do meanwhile;
  // without, nobody else has use for it. In a forked child nothing: see `part`.
  void lift(bool keep);
  // In a forked child: gives it pages of its own, with what they hold now. The parent may have written meanwhile.
  void part() const;

 private:
  bool is_mapped() const;  // by asking the kernel, which takes a while
  std::byte* pages_in_arena() const;
  size_t offset_of_pages() const;
  void make_private() const;

  const std::shared_ptr<Segment> segment_;
  std::byte* const address_;
  const size_t bytes_;
  std::byte* const pages_;  // the first whole page
  const size_t page_bytes_;
  std::byte* block_ = nullptr;
  std::byte* place_ = nullptr;
  bool is_lifted_ = false;
};

}  // namespace multiring
