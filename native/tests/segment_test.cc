// Tests the allocator of a segment: which freed pages stay resident, which return to the kernel, and that blocks never
// overlap.

#include "core/memory/segment.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <random>

#include "core/memory/fault.h"
#include "checks.h"

using namespace multiring;
using namespace multiring::checks;

namespace {

constexpr size_t kMiB = size_t{1} << 20;
bool holds_only(const std::byte* block, size_t bytes, int value) {
  return std::all_of(block, block + bytes, [value](std::byte each) { return each == static_cast<std::byte>(value); });
}

void freed_memory_is_handed_out_again_as_it_was() {
  Segment segment(size_t{1} << 30);
  std::byte* first = segment.allocate(8 * kMiB);
  std::byte* fence = segment.allocate(64);  // separates the two blocks, so that they do not merge when freed
  std::byte* second = segment.allocate(8 * kMiB);
  std::memset(first, 1, 8 * kMiB);
  std::memset(second, 2, 8 * kMiB);
  segment.release(first);
  segment.release(second);
  std::byte* again = segment.allocate(8 * kMiB);
  check(again == second, "the most recently freed block is allocated first");
  check(holds_only(again, 8 * kMiB, 2), "the pages of a warm block are kept");
  std::byte* smaller = segment.allocate(2 * kMiB);
  check(smaller == first && holds_only(smaller, 2 * kMiB, 1), "a smaller block uses part of a warm block");
  std::byte* rest = segment.allocate(6 * kMiB);
  check(rest == first + 2 * kMiB && holds_only(rest, 6 * kMiB, 1), "the rest of a warm block stays warm");
  for (std::byte* block : {again, smaller, rest, fence}) segment.release(block);
  check(segment.used_bytes() == 0, "no memory is in use at the end");
}

// Tests pages that are larger than the alignment of a block: only pages that belong to one block alone are returned.
void whole_pages_of_the_kernel_are_given_back() {
  constexpr size_t kLargePage = size_t{64} << 10;
  Segment segment(size_t{1} << 30, 0, 0, kLargePage);
  std::byte* block = segment.allocate(kMiB + 4096);
  if (reinterpret_cast<uintptr_t>(block) % kLargePage == 0) {  // the block begins at a page boundary by chance
    segment.allocate(kPagedBytes / 2);
    block = segment.allocate(kMiB + 4096);
  }
  const size_t before = kLargePage - static_cast<size_t>(block - segment.mapping().base()) % kLargePage;
  const size_t after = (static_cast<size_t>(block - segment.mapping().base()) + kMiB + 4096) % kLargePage;
  std::memset(block, 1, kMiB + 4096);
  segment.release(block);
  check(before < kLargePage && holds_only(block, before, 1), "a page that another block uses, too, is kept");
  check(holds_only(block + before, kMiB + 4096 - before - after, 0), "whole pages are returned to the kernel");
  check(holds_only(block + kMiB + 4096 - after, after, 1), "a partial page at the end is kept");
}

void what_is_too_much_is_given_back_oldest_first() {
  Segment segment(size_t{1} << 30, 16 * kMiB);
  std::byte* blocks[3];
  std::byte* fences[3];
  for (int i = 0; i < 3; ++i) {
    blocks[i] = segment.allocate(8 * kMiB);
    fences[i] = segment.allocate(64);
    std::memset(blocks[i], i + 1, 8 * kMiB);
  }
  for (std::byte* block : blocks) segment.release(block);
  check(holds_only(blocks[0], 8 * kMiB, 0), "the oldest pages are returned");
  check(holds_only(blocks[1], 8 * kMiB, 2) && holds_only(blocks[2], 8 * kMiB, 3), "newer pages are kept");
  std::byte* large = segment.allocate(64 * kMiB);
  std::memset(large, 4, 64 * kMiB);
  segment.release(large);
  check(holds_only(large, 64 * kMiB, 0), "a block larger than the bound is returned at once");
  for (std::byte* fence : fences) segment.release(fence);
}

void what_is_wanted_again_and_again_is_kept() {
  const auto kept_after = [](size_t warmest, int rounds) {
    Segment segment(size_t{1} << 30, 8 * kMiB, warmest);
    size_t kept = 0;
    for (int round = 0; round <= rounds; ++round) {
      std::byte* blocks[3];
      for (auto& block : blocks) block = segment.allocate(8 * kMiB);
      kept = 0;
      for (std::byte* block : blocks) {
        kept += holds_only(block, 8 * kMiB, 1) ? 1 : 0;
        std::memset(block, 1, 8 * kMiB);
      }
      for (std::byte* block : blocks) segment.release(block);
    }
    return kept;
  };
  check(kept_after(64 * kMiB, 1) == 1, "at first, the bound limits the warm memory");
  check(kept_after(64 * kMiB, 2) == 3, "the bound grows if memory is needed again");
  check(kept_after(16 * kMiB, 4) == 2, "the bound never exceeds its limit");
}

void small_blocks_may_lie_in_warm_memory() {
  Segment segment(size_t{1} << 30, 4 * kMiB);
  std::byte* large = segment.allocate(4 * kMiB);
  std::memset(large, 1, 4 * kMiB);
  segment.release(large);
  std::byte* small = segment.allocate(100);  // first fit: at the place of the large block
  std::memset(small, 7, 100);
  std::byte* other = segment.allocate(3 * kMiB);
  std::memset(other, 8, 3 * kMiB);
  segment.release(other);
  std::byte* full = segment.allocate(4 * kMiB);
  segment.release(full);  // exceeds the bound, so the remaining warm pages are returned
  check(holds_only(small, 100, 7), "pages of a block in use are never returned");
  segment.release(small);
}

// Compares random calls with a map of the blocks in use: no overlaps, no changed contents, no memory in use at the end.
void any_order_of_calls() {
  Segment segment(96 * kMiB, 8 * kMiB);
  std::mt19937 random(7);
  std::map<std::byte*, size_t> live;
  const size_t sizes[] = {1, 64, 4096, 70'000, kMiB - 64, kMiB, kMiB + 4160, 3 * kMiB, 9 * kMiB};
  const auto mark_of = [](std::byte* block) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(block) >> 6 & 0x7f);
  };
  bool intact = true;
  bool apart = true;
  int refused = 0;
  for (int step = 0; step < 3000; ++step) {
    if (!live.empty() && random() % 2 == 0) {
      const auto chosen = std::next(live.begin(), static_cast<long>(random() % live.size()));
      intact &= holds_only(chosen->first, std::min<size_t>(chosen->second, 128), mark_of(chosen->first)) &&
                chosen->first[chosen->second - 1] == static_cast<std::byte>(mark_of(chosen->first));
      segment.release(chosen->first);
      live.erase(chosen);
      continue;
    }
    const size_t size = sizes[random() % std::size(sizes)];
    try {
      std::byte* block = segment.allocate(size);
      const auto after = live.lower_bound(block);
      apart &= after == live.end() || block + size <= after->first;
      apart &= after == live.begin() || std::prev(after)->first + std::prev(after)->second <= block;
      std::memset(block, mark_of(block), std::min<size_t>(size, 128));
      block[size - 1] = static_cast<std::byte>(mark_of(block));
      live[block] = size;
    } catch (const Fault&) {
      ++refused;
    }
  }
  check(apart, "no two blocks share a byte");
  check(intact, "a block keeps its contents");
  check(refused > 0, "the segment was full at times");
  for (const auto& [block, size] : live) segment.release(block);
  check(segment.used_bytes() == 0, "all memory was released");
  std::byte* whole = segment.allocate(96 * kMiB - Mapping::kHeapStart);
  check(whole != nullptr, "the freed memory forms one block again");
  segment.release(whole);
}

void allocator() {
  const auto segment = std::make_shared<Segment>(size_t{1} << 26);
  std::vector<std::byte*> blocks;
  for (size_t i = 1; i < 200; ++i) {
    blocks.push_back(segment->allocate(i * 997));
    std::memset(blocks.back(), static_cast<int>(i), i * 997);
  }
  bool apart = true;
  for (size_t i = 1; i < 200; ++i) apart &= blocks[i - 1][i * 997 - 1] == static_cast<std::byte>(i);
  check(apart, "blocks do not overlap");
  for (size_t i = 0; i < blocks.size(); i += 2) segment->release(blocks[i]);
  for (size_t i = 1; i < blocks.size(); i += 2) segment->release(blocks[i]);
  check(segment->used_bytes() == 0, "all memory was released");
  std::byte* whole = segment->allocate((size_t{1} << 26) - Mapping::kHeapStart);
  segment->release(whole);
  check(true, "freed blocks merge");
  bool refused = false;
  try {
    segment->allocate(size_t{1} << 27);
  } catch (const Fault&) {
    refused = true;
  }
  check(refused, "a full segment reports an error");
}

}  // namespace

int main() {
  allocator();
  freed_memory_is_handed_out_again_as_it_was();
  whole_pages_of_the_kernel_are_given_back();
  what_is_too_much_is_given_back_oldest_first();
  what_is_wanted_again_and_again_is_kept();
  small_blocks_may_lie_in_warm_memory();
  any_order_of_calls();
  return result();
}
