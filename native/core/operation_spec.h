// What one rank asks an operation to be, and what it finds on its rank.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "link.h"
#include "program.h"
#include "segment.h"
#include "shared_slots.h"

namespace multiring {

// One round of agreement: a note goes to `to` and one comes from `from` (world ranks).
struct Round {
  int to;
  int from;
};

struct OperationSpec {
  OperationKey key;
  std::vector<int> members;                          // world ranks
  std::shared_ptr<const std::vector<Round>> rounds;  // empty for one rank
  std::shared_ptr<SharedSlots> slots;  // the group's, where all of it is on one host; null: none
  bool meets = false;  // may meet there: a blocking call, a lowering that can, a payload that fits
  bool tells_mismatch = false;  // a mismatch becomes a control message, so that it is heard of though nobody waits
  bool at_once = false;  // every rank tells every other directly, all rounds at the same time
  Digest digest{};
  std::string description;  // shown to other ranks in a mismatch
  std::shared_ptr<const Program> program;  // null: agree only (barrier, or a rank whose arguments are wrong)
  std::array<std::byte*, 2> bases{};       // input, output
  uint64_t user_bytes = 0;                 // for events
  uint32_t name = 0;                       // for events
};

// The rank an operation lives on.
class OperationHost {
 public:
  virtual ~OperationHost() = default;
  virtual Link& link(int peer) = 0;  // connects when first asked
  virtual Segment& segment() = 0;
  virtual int rank() const = 0;
  virtual bool logs_moves() const = 0;
  virtual uint64_t& staged_bytes() = 0;  // of all operations in flight
  virtual bool lowers() const = 0;  // false: move by move, for tests
  virtual bool times_work() const = 0;  // whether operations keep their reductions
  virtual bool shares_memory(int peer) const = 0;  // whether a rank of this host, alive as far as is known
};

}  // namespace multiring
