#include "slot_execution.h"

#include <algorithm>
#include <array>
#include <cassert>

namespace multiring {

void combine_published(const Program& program, const SharedSlots& slots, uint64_t sequence, std::byte* target,
                       size_t bytes) {
  if (bytes == 0) return;
  const auto found = std::find_if(program.moves.begin(), program.moves.end(),
                                  [](const Move& move) { return move.kind == MoveKind::reduce; });
  if (found == program.moves.end()) return;
  std::array<const void*, 64> sources;
  assert(found->peers.size() <= sources.size());
  for (size_t i = 0; i < found->peers.size(); ++i) sources[i] = slots.payload(found->peers[i], sequence);
  combine(program.dtype, program.op, target, sources.data(), static_cast<int>(found->peers.size()),
          bytes / size_of(program.dtype), program.divisor);
}

void SlotExecution::enter(bool is_published) {
  OperationSpec& spec = operation_.spec;
  operation_.host.segment().mapping().control().in_slots.fetch_add(1, std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_seq_cst);  // before the slots are read; see SharedSlots::wake_waiting
  if (is_published) return;
  spec.slots->publish(spec.key.sequence, spec.digest, spec.bases[1], spec.program ? spec.user_bytes : 0);
}

void SlotExecution::leave() {
  operation_.host.segment().mapping().control().in_slots.fetch_sub(1, std::memory_order_relaxed);
}

SharedSlots::Seen SlotExecution::advance() {
  const OperationSpec& spec = operation_.spec;
  const auto seen = spec.slots->look(spec.key.sequence, spec.digest);
  if (seen != SharedSlots::Seen::all) return seen;
  operation_.agreed = Clock::now();
  if (!spec.program) return seen;
  {
    const Reducing reducing(operation_);
    combine_published(*spec.program, *spec.slots, spec.key.sequence, spec.bases[1], spec.user_bytes);
  }
  if (operation_.host.logs_moves()) {
    for (const Move* reduction : reductions_of(*spec.program)) {
      const auto index = static_cast<uint32_t>(reduction - spec.program->moves.data());
      operation_.log.push_back({Lowering::exchange, 0, index, reduction->size});
    }
  }
  return seen;
}

}  // namespace multiring
