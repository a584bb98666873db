#include "backing.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <utility>

#include "descriptor.h"
#include "fault.h"

namespace multiring {
namespace {

uintptr_t number(const std::byte* address) { return reinterpret_cast<uintptr_t>(address); }

std::byte* page_from(std::byte* address) { return address + (kPage - number(address) % kPage) % kPage; }

size_t whole_pages(std::byte* address, size_t bytes) {
  const auto before = static_cast<size_t>(page_from(address) - address);
  return bytes < before ? 0 : (bytes - before) / kPage * kPage;
}

// Writes what is there, atomically. In assembly where compilers may find that it can be left out.
void change_nothing(std::byte* address) {
#if defined(__x86_64__)
  asm volatile("lock; orb $0, %0" : "+m"(*address) : : "memory", "cc");
#else
  __atomic_fetch_or(reinterpret_cast<volatile uint8_t*>(address), 0, __ATOMIC_SEQ_CST);
#endif
}

// A line of /proc/self/maps: addresses, rights, offset, device, inode, name.
struct Pages {
  uintptr_t low = 0;
  uintptr_t high = 0;
  char rights[5] = {};
  uint64_t offset = 0;
  uint64_t inode = 0;
  std::string name;
};

// Whether every page of [low, high) is of a kind.
template <typename Kind>
bool are_all(uintptr_t low, uintptr_t high, Kind is_of_kind) {
  std::FILE* maps = std::fopen("/proc/self/maps", "re");
  if (maps == nullptr) return false;
  char line[8192];
  while (low < high && std::fgets(line, sizeof line, maps) != nullptr) {
    Pages pages;
    int name_at = 0;
    if (std::sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %4s %" SCNx64 " %*s %" SCNu64 " %n", &pages.low, &pages.high,
                    pages.rights, &pages.offset, &pages.inode, &name_at) != 5) {
      continue;
    }
    if (pages.high <= low) continue;
    pages.name = line + name_at;
    if (pages.low > low || !is_of_kind(pages)) break;
    low = pages.high;
  }
  std::fclose(maps);
  return low >= high;
}

// Private pages of no file; or of a segment, which were lifted and are all copies by now.
bool is_ordinary(const Pages& pages) {
  const std::string rights = pages.rights;
  if (!rights.starts_with("rw") || !rights.ends_with("p")) return false;
  if (pages.inode != 0) return pages.name.starts_with("/memfd:multiring");
  return pages.name.empty() || pages.name.starts_with("[heap]") || pages.name.starts_with("[anon");
}

}  // namespace

Backing::Backing(std::shared_ptr<Segment> segment, std::byte* address, size_t bytes)
    : segment_(std::move(segment)),
      address_(address),
      bytes_(bytes),
      pages_(page_from(address)),
      page_bytes_(whole_pages(address, bytes)) {
  if (::sysconf(_SC_PAGESIZE) != long{kPage}) throw Fault(FaultKind::state, "pages are not of 4 KiB");
  if (page_bytes_ == 0) throw Fault(FaultKind::argument, std::to_string(bytes) + " bytes hold no whole page");
  if (!are_all(number(pages_), number(pages_) + page_bytes_, is_ordinary)) {
    throw Fault(FaultKind::state, "the memory is not private, or a file's");
  }
  // The rest is for those who ask for memory.
  if (segment_->used_bytes() + bytes > segment_->mapping().bytes() / 2) {
    throw Fault(FaultKind::argument, "no room: half of the segment is in use");
  }
  // From the start of a page: there its bytes lie as they do in theirs.
  block_ = segment_->allocate(std::max(bytes + kPage, kPagedBytes));
  place_ = block_ + number(address) % kPage;
  std::memcpy(place_, address_, bytes_);
  if (::mmap(pages_, page_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, segment_->fd(),
             static_cast<off_t>(offset_of_pages())) == MAP_FAILED) {
    const int code = errno;
    // Where the kernel took away what was there, its copy is all that there is.
    if (!are_all(number(pages_), number(pages_) + page_bytes_, is_ordinary)) {
      if (::mmap(pages_, page_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
          MAP_FAILED) {
        std::fputs("multiring: the kernel took memory away that it was to map anew\n", stderr);
        std::terminate();
      }
      std::memcpy(pages_, pages_in_arena(), page_bytes_);
    }
    segment_->release(block_);
    errno = code;
    throw_errno(FaultKind::state, "mapping pages of the arena");
  }
}

Backing::~Backing() {
  try {
    lift(true);
  } catch (const Fault&) {  // it stays as it is, and the block nobody else's
    segment_->condemn(block_);
  }
}

std::byte* Backing::pages_in_arena() const { return place_ + (pages_ - address_); }

size_t Backing::offset_of_pages() const {
  return static_cast<size_t>(pages_in_arena() - segment_->mapping().base());
}

bool Backing::is_mapped() const {
  struct stat file {};
  if (::fstat(segment_->fd(), &file) != 0) return false;
  const uintptr_t low = number(pages_);
  return are_all(low, low + page_bytes_, [&](const Pages& pages) {
    return pages.rights[3] == 's' && pages.inode == file.st_ino && pages.offset - pages.low == offset_of_pages() - low;
  });
}

bool Backing::stands() const {
  if (is_lifted_) return false;
  bool is_same = true;
  for (const size_t at : {size_t{0}, page_bytes_ - 1}) {
    std::atomic_ref<std::byte> here(pages_[at]);
    std::atomic_ref<std::byte> there(pages_in_arena()[at]);
    const std::byte was = there.load(std::memory_order_relaxed);
    there.store(~was, std::memory_order_relaxed);
    const bool shows = here.load(std::memory_order_relaxed) == ~was;
    there.store(was, std::memory_order_relaxed);
    is_same &= shows && here.load(std::memory_order_relaxed) == was;
  }
  return is_same;
}

void Backing::fill() const {
  const auto before = static_cast<size_t>(pages_ - address_);
  const size_t until = before + page_bytes_;
  std::memcpy(place_, address_, before);
  std::memcpy(place_ + until, address_ + until, bytes_ - until);
}

void Backing::empty() const {
  const auto before = static_cast<size_t>(pages_ - address_);
  const size_t until = before + page_bytes_;
  std::memcpy(address_, place_, before);
  std::memcpy(address_ + until, place_ + until, bytes_ - until);
}

void Backing::lift(bool keep) {
  if (is_lifted_ || is_forked_child()) return;
  if (!is_mapped()) {  // freed meanwhile, and maybe somebody else's
    is_lifted_ = true;
    segment_->condemn(block_);
    return;
  }
  if (!keep) {
    if (::mmap(pages_, page_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
        MAP_FAILED) {
      throw_errno(FaultKind::state, "mapping pages of no file");
    }
    is_lifted_ = true;
    segment_->release(block_);
    return;
  }
  make_private();
  is_lifted_ = true;
  // An allocator may drop these pages and want zeros: nobody gets the block again, and it holds nothing.
  segment_->condemn(block_);
  ::madvise(pages_in_arena(), page_bytes_, MADV_REMOVE);
}

void Backing::part() const {
  if (!is_lifted_ && is_mapped()) make_private();
}

// Private pages show the block's until they are written: an atomic change of nothing in each, and the kernel copies it,
// with whatever others have written into it so far.
void Backing::make_private() const {
  if (::mmap(pages_, page_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED, segment_->fd(),
             static_cast<off_t>(offset_of_pages())) == MAP_FAILED) {
    throw_errno(FaultKind::state, "mapping pages of the arena privately");
  }
  for (size_t at = 0; at < page_bytes_; at += kPage) change_nothing(pages_ + at);
}

}  // namespace multiring
