// Pages of the arena behind memory of somebody else's: what it holds stays, whatever comes after.

#include "core/backing.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "checks.h"
#include "core/fault.h"

using namespace multiring;
using namespace multiring::checks;

namespace {

constexpr size_t kMiB = size_t{1} << 20;

std::shared_ptr<Segment> new_segment() { return std::make_shared<Segment>(64 * kMiB); }

// Private pages of this process's own.
struct Memory {
  explicit Memory(size_t size, int flags = MAP_PRIVATE | MAP_ANONYMOUS, int fd = -1)
      : bytes(size), start(static_cast<std::byte*>(::mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, fd, 0))) {}
  ~Memory() { ::munmap(start, bytes); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  const size_t bytes;
  std::byte* const start;
};

void number_all(std::byte* start, size_t bytes) {
  for (size_t at = 0; at < bytes; ++at) start[at] = static_cast<std::byte>(at * 7 + at / 251);
}

bool are_numbered(const std::byte* start, size_t bytes) {
  for (size_t at = 0; at < bytes; ++at) {
    if (start[at] != static_cast<std::byte>(at * 7 + at / 251)) return false;
  }
  return true;
}

bool holds_only(const std::byte* start, size_t bytes, int value) {
  return std::all_of(start, start + bytes, [value](std::byte each) { return each == static_cast<std::byte>(value); });
}

// Wherever the bytes begin and end, the neighbours on their first and last page included.
void it_is_the_same_memory() {
  const auto segment = new_segment();
  Memory memory(kMiB);
  for (const auto& [before, bytes] : std::vector<std::pair<size_t, size_t>>{
           {0, kMiB}, {64, kMiB - 64}, {0, kMiB - 64}, {4032, 300'000}, {64, 3 * kPage}, {kPage, kPage}}) {
    std::byte* const address = memory.start + before;
    std::memset(memory.start, 1, kMiB);
    number_all(address, bytes);
    Backing backing(segment, address, bytes);
    check(are_numbered(address, bytes) && are_numbered(backing.place(), bytes), "both show what was there");
    check(backing.stands(), "it stands");
    check(are_numbered(address, bytes), "asking changes nothing");
    std::memset(address, 2, bytes);
    backing.fill();
    check(holds_only(backing.place(), bytes, 2), "what is written shows in the arena");
    std::memset(backing.place(), 3, bytes);
    backing.empty();
    check(holds_only(address, bytes, 3), "and the other way round");
    check(holds_only(memory.start, before, 1) && holds_only(address + bytes, kMiB - before - bytes, 1),
          "what lies beside it is not touched");
    backing.lift(true);
    check(holds_only(address, bytes, 3), "lifted it holds what it held");
    std::memset(backing.place(), 4, bytes);
    check(holds_only(address, bytes, 3) && !backing.stands(), "and is nobody else's");
    std::memset(backing.place(), 0, bytes);
  }
  std::byte* const still = segment->allocate(kPagedBytes);
  check(holds_only(still, kPagedBytes, 0), "no block is handed out again that private pages may show");
}

template <typename Body>
FaultKind fault_of(Body body) {
  try {
    body();
  } catch (const Fault& fault) {
    return fault.kind();
  }
  return FaultKind::none;
}

void what_is_not_ordinary_is_refused() {
  const auto segment = new_segment();
  const size_t used = segment->used_bytes();
  const int fd = ::memfd_create("test", 0);
  check(::ftruncate(fd, kMiB) == 0, "a file of a mebibyte");
  Memory of_file(kMiB, MAP_PRIVATE, fd);
  Memory shared(kMiB, MAP_SHARED | MAP_ANONYMOUS);
  Memory half(2 * kMiB);
  ::mprotect(half.start + kMiB, kMiB, PROT_READ);
  Memory ordinary(kMiB);
  for (auto [start, bytes] : {std::pair{of_file.start, kMiB}, {shared.start, kMiB}, {half.start, 2 * kMiB}}) {
    const std::byte* const at = start;
    const size_t size = bytes;
    check(fault_of([&] { Backing(segment, const_cast<std::byte*>(at), size); }) == FaultKind::state, "not ordinary");
  }
  check(fault_of([&] { Backing(segment, ordinary.start + 64, kPage); }) == FaultKind::argument, "no whole page");
  Memory large(80 * kMiB);
  check(fault_of([&] { Backing(segment, large.start, large.bytes); }) == FaultKind::argument, "no room");
  {
    Backing backing(segment, ordinary.start, kMiB);
    check(fault_of([&] { Backing(segment, ordinary.start + kPage, kPage); }) == FaultKind::state, "backed already");
    backing.lift(false);
  }
  check(segment->used_bytes() == used, "nothing is left in use");
  ::close(fd);
}

void lifted_for_good_it_gives_its_block_back() {
  const auto segment = new_segment();
  Memory memory(kMiB);
  for (int turn = 0; turn < 200; ++turn) {  // three times what the segment has room for
    Backing backing(segment, memory.start + 64, kMiB - 64);
    backing.lift(false);
  }
  check(segment->used_bytes() == 0, "every block came back");
  std::memset(memory.start, 5, kMiB);
  std::byte* const block = segment->allocate(kMiB);
  check(holds_only(memory.start, kMiB, 5) && block != nullptr, "and the memory is the owner's alone");
}

void memory_that_is_another_by_now_is_left_alone() {
  const auto segment = new_segment();
  for (const bool keep : {true, false}) {
    Memory memory(kMiB);
    Backing backing(segment, memory.start, kMiB);
    ::mmap(memory.start, kMiB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    std::memset(memory.start, 6, kMiB);
    check(!backing.stands(), "it does not stand");
    backing.lift(keep);
    check(holds_only(memory.start, kMiB, 6), "what is there now stays");
  }
  Memory memory(kMiB);
  Backing backing(segment, memory.start, kMiB);
  ::mmap(memory.start + kMiB - kPage, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  check(!backing.stands(), "nor does it where only the end is another's");
}

// One writer's counts, in a word of its own on every page. TSan takes mapping pages anew for writing into them.
__attribute__((no_sanitize("thread"))) void count(std::byte* start, size_t at, std::vector<uint32_t>& counted) {
  for (size_t page = 0; page < counted.size(); ++page) {
    auto& own = reinterpret_cast<volatile uint32_t&>(start[page * kPage + at]);
    own = own + 1;
    ++counted[page];
  }
}

// Other threads count in every page while it is lifted: no count is lost.
void what_others_write_while_it_is_lifted_stays() {
  const auto segment = new_segment();
  for (int turn = 0; turn < 20; ++turn) {
    Memory memory(kMiB);
    Backing backing(segment, memory.start, kMiB);
    std::atomic<bool> is_over{false};
    std::atomic<int> begun{0};
    std::vector<std::vector<uint32_t>> counted(2, std::vector<uint32_t>(kMiB / kPage));
    std::vector<std::thread> writers;
    for (size_t writer = 0; writer < counted.size(); ++writer) {
      writers.emplace_back([&, writer] {
        ++begun;
        while (!is_over.load()) count(memory.start, 64 * (1 + writer), counted[writer]);
      });
    }
    while (begun.load() < 2) std::this_thread::yield();
    backing.lift(true);
    is_over.store(true);
    for (std::thread& writer : writers) writer.join();
    bool is_all_there = true;
    for (size_t writer = 0; writer < counted.size(); ++writer) {
      for (size_t page = 0; page < counted[writer].size(); ++page) {
        const auto found = reinterpret_cast<uint32_t&>(memory.start[page * kPage + 64 * (1 + writer)]);
        is_all_there &= found == counted[writer][page];
      }
    }
    check(is_all_there, "every count is there");
  }
}

void a_forked_child_has_its_own() {
  const auto segment = new_segment();
  Memory memory(kMiB);
  Backing backing(segment, memory.start, kMiB);
  std::memset(memory.start, 1, kMiB);
  const pid_t child = ::fork();
  if (child == 0) {
    backing.part();
    const bool shows = holds_only(memory.start, kMiB, 1);
    std::memset(memory.start, 2, kMiB);
    backing.part();
    backing.lift(true);
    ::_exit(shows && holds_only(memory.start, kMiB, 2) && holds_only(backing.place(), kMiB, 1) ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child sees what there was, and then what it writes");
  check(holds_only(memory.start, kMiB, 1) && backing.stands(), "of which the parent sees nothing");
}

}  // namespace

int main() {
  it_is_the_same_memory();
  what_is_not_ordinary_is_refused();
  lifted_for_good_it_gives_its_block_back();
  memory_that_is_another_by_now_is_left_alone();
  what_others_write_while_it_is_lifted_stays();
  a_forked_child_has_its_own();
  return result();
}
