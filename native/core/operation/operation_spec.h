// The description of an operation on one rank, and the interface of the rank that runs it.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "links/link.h"
#include "memory/segment.h"
#include "memory/shared_slots.h"
#include "program.h"

namespace multiring {

// One round of agreement: this rank sends a note to `to` and receives one from `from` (world ranks).
struct Round {
  int to;
  int from;
};

struct OperationSpec {
  OperationKey key;
  std::vector<int> members;                          // world ranks
  std::shared_ptr<const std::vector<Round>> rounds;  // empty for one rank
  std::shared_ptr<SharedSlots> slots;  // the group's slots if all members are on one host, else null
  bool meets = false;  // may run in the slots: a blocking call with a suitable lowering, whose payload fits
  bool tells_mismatch = false;  // also report a mismatch as a control message, because no caller may be waiting
  bool at_once = false;  // every rank notifies every other rank directly, in all rounds at the same time
  Digest digest{};
  std::string description;  // the error text of a mismatch shows it on all ranks
  std::shared_ptr<const Program> program;  // null: only agree (a barrier, or a rank with invalid arguments)
  std::array<std::byte*, 2> bases{};       // addresses of the input and the output
  uint64_t user_bytes = 0;                 // size of the user's buffer
  uint32_t name = 0;                       // number of its name in events
};

// The services that an operation needs from its rank.
class OperationHost {
 public:
  virtual ~OperationHost() = default;
  virtual Link& link(int peer) = 0;  // the first call for a peer connects to it
  virtual Segment& segment() = 0;
  virtual int rank() const = 0;
  virtual bool logs_moves() const = 0;
  virtual uint64_t& staged_bytes() = 0;  // bytes staged by all operations in flight
  virtual bool lowers() const = 0;  // false: run programs move by move (for tests)
  virtual bool times_work() const = 0;  // true if operations record the times of their reductions
  virtual bool shares_memory(int peer) const = 0;  // true if `peer` is on this host and not known to be lost
};

}  // namespace multiring
