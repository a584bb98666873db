#include "slice_execution.h"

#include <cstring>
#include <map>

#include "memory/fault.h"

namespace multiring {
namespace {

// A block stays in the level-1 cache between combining and writing. Larger blocks make the memory alternate between
// long reads and writes, which is slower. With buffers outside the cache, 1 MiB on two ranks took 53 us with blocks of
// 4 KiB and 71 us with blocks of 16 KiB. With buffers in the cache there was no difference.
constexpr uint64_t kSliceBlock = 4 * 1024;
// Ordinary memory up to this size is copied into the segment and back. If it stays in cache, two copies cost less than
// process_vm_readv, which pins its pages. docs/decisions/0006 has the figures.
constexpr uint64_t kMostStaged = 8 << 20;
constexpr uint64_t kMostStagedInAll = 64 << 20;  // for all operations in flight; more would not stay in cache

}  // namespace

bool SliceExecution::is_wanted() const {
  const OperationSpec& spec = operation_.spec;
  return spec.at_once && spec.program && spec.program->lowering == Lowering::slice && operation_.host.lowers();
}

bool SliceExecution::is_offered() const {
  const OperationSpec& spec = operation_.spec;
  return spec.program && spec.program->lowering == Lowering::slice && agreement_.note_of(0, shared()).offset != 0;
}

void SliceExecution::stage() {
  const OperationSpec& spec = operation_.spec;
  OperationHost& host = operation_.host;
  if (!is_wanted()) return;
  const uint64_t bytes = spec.user_bytes;
  if (bytes == 0 || bytes > kMostStaged || host.staged_bytes() + bytes > kMostStagedInAll) return;
  if (host.segment().mapping().contains(spec.bases[1], bytes)) return;
  try {
    staged_ = host.segment().allocate(bytes);
  } catch (const Fault&) {  // the segment is full; the operation runs move by move
    return;
  }
  host.staged_bytes() += bytes;
  copy_but_slice(staged_, spec.bases[1]);
}

void SliceExecution::unstage() {
  if (staged_ == nullptr) return;
  operation_.host.segment().release(std::exchange(staged_, nullptr));
  operation_.host.staged_bytes() -= operation_.spec.user_bytes;
}

// Copies the buffer except this rank's slices. The other ranks neither read nor write them.
void SliceExecution::copy_but_slice(std::byte* to, const std::byte* from) const {
  uint64_t done = 0;
  for (const Move* own : reductions_of(operation_.program())) {  // in the order of memory
    std::memcpy(to + done, from + done, own->target_offset - done);
    done = own->target_offset + own->size;
  }
  std::memcpy(to + done, from + done, operation_.spec.user_bytes - done);
}

bool SliceExecution::choose() {
  if (!is_wanted()) return false;
  const OperationSpec& spec = operation_.spec;
  std::vector<const Move*> found = reductions_of(operation_.program());
  if (found.empty() || agreement_.note_of(0, shared()).offset == 0) return false;
  std::map<int, uint64_t> offsets;
  for (size_t i = 0; i < spec.rounds->size(); ++i) offsets[(*spec.rounds)[i].from] = agreement_.offset_in(i);
  for (const int peer : found.front()->peers) {
    const bool own = peer == operation_.rank();
    std::byte* at = own ? spec.bases[1] : operation_.host.link(peer).reach(offsets[peer], spec.user_bytes);
    if (at == nullptr || (!own && offsets[peer] == 0)) {
      reached_.clear();
      return false;
    }
    reached_.push_back(at);
  }
  slices_ = std::move(found);
  sources_.resize(reached_.size());
  return true;
}

// Returns false if a peer has failed, because its bytes may be invalid.
bool SliceExecution::combine_slice(const Move& slice, uint64_t& budget) {
  const Program& program = operation_.program();
  const Reducing reducing(operation_);
  while (budget > 0 && progress_ < slice.size) {
    const uint64_t size = std::min(kSliceBlock, slice.size - progress_);
    const uint64_t at = slice.target_offset + progress_;
    for (size_t i = 0; i < reached_.size(); ++i) sources_[i] = reached_[i] + at;
    std::byte* own = operation_.spec.bases[1] + at;
    combine(program.dtype, program.op, own, sources_.data(), static_cast<int>(sources_.size()),
            size / size_of(program.dtype), program.divisor);
    if (operation_.reads_failed_memory(peers())) return false;
    for (std::byte* buffer : reached_) {
      if (buffer + at != own) std::memcpy(buffer + at, own, size);
    }
    progress_ += size;
    budget -= std::min(budget, size);
  }
  return true;
}

SliceOutcome SliceExecution::advance() {
  for (uint64_t budget = kTurn; slice_ < slices_.size(); ++slice_) {
    const Move& slice = *slices_[slice_];
    if (!combine_slice(slice, budget)) return SliceOutcome::waits;
    if (progress_ < slice.size) return SliceOutcome::moved;
    // Check this for an empty slice, too, before the other ranks are told that this rank is done.
    if (operation_.reads_failed_memory(peers())) return SliceOutcome::waits;
    if (operation_.host.logs_moves()) {
      const Lowering how = staged_ != nullptr ? Lowering::staged_slice : Lowering::slice;
      const auto index = static_cast<uint32_t>(&slice - operation_.program().moves.data());
      operation_.log.push_back({how, 0, index, progress_});
    }
    progress_ = 0;
  }
  say_completed();
  return SliceOutcome::done;
}

void SliceExecution::say_completed() {
  const auto& rounds = *operation_.spec.rounds;
  for (size_t i = 0; i < rounds.size(); ++i) {
    Frame note = agreement_.note_of(i, shared());
    note.round = static_cast<uint8_t>(kCompletion + i);
    operation_.host.link(rounds[i].to).send(note);
  }
}

SliceOutcome SliceExecution::pass_barrier() {
  for (; !is_past_barrier(); ++barrier_) {
    if (!agreement_.has_heard(static_cast<uint8_t>(kCompletion + barrier_))) return SliceOutcome::waits;
  }
  if (staged_ != nullptr) copy_but_slice(operation_.spec.bases[1], staged_);
  return SliceOutcome::done;
}

}  // namespace multiring
