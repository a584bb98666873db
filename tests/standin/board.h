// The memory that the ranks of one communicator share.
//
// It is an anonymous file of the process that made the communicator's id. The others open it through /proc, so that
// nothing is left behind, whichever process is killed.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace standin {

constexpr int kMostRanks = 16;
constexpr int kMostSeen = 16;          // communicators of a device whose operations are counted
constexpr int kMostPlaced = 64;
constexpr size_t kSlotBytes = 64 << 20;  // the largest operand
constexpr size_t kBoxBytes = 64 << 10;   // the largest piece of a message

// What NCCL passes to the other ranks as ncclUniqueId.
struct BoardId {
  char magic[8];
  int process;
  int file;
  uint64_t nonce;
};

// How many operations of a communicator a device was given before this one.
struct Count {
  uint64_t communicator;
  uint64_t operations;
};

// An operation that a rank's device was given.
struct Placement {
  std::atomic<uint64_t> number;  // 0: none yet
  Count before[kMostSeen];
};

struct RankEntry {
  std::atomic<int> process;
  std::atomic<int> device;
  std::atomic<uint64_t> step;
  char call[160];
  Placement placements[kMostPlaced];  // by number modulo their count
  int color;
  int key;
  BoardId child;
};

struct Box {
  std::atomic<uint64_t> sent;
  std::atomic<uint64_t> taken;
  size_t message_bytes;  // of the message to which the piece belongs
  size_t bytes;
  char data[kBoxBytes];
};

class Board {
 public:
  static bool make(BoardId* id);
  static Board* open(const BoardId& id);  // null if the process that made it has ended
  ~Board();

  RankEntry& rank(int number) const { return ranks()[number]; }
  Box& box(int from, int to) const;
  char* slot(int number) const;
  uint64_t nonce() const { return nonce_; }

 private:
  Board(char* base, uint64_t nonce) : base_(base), nonce_(nonce) {}
  RankEntry* ranks() const { return reinterpret_cast<RankEntry*>(base_); }

  char* base_;
  uint64_t nonce_;
};

}  // namespace standin
