#include "operation_table.h"

#include <algorithm>
#include <cstring>

namespace multiring {
namespace {

uint64_t first_bytes(const Digest& digest) {
  uint64_t first = 0;
  std::memcpy(&first, digest.data(), sizeof first);
  return first;
}

}  // namespace

bool OperationTable::is_quick(const Operation& operation) const {
  const auto& members = operation.spec().members;
  return operation.spec().user_bytes <= kQuickBytes && members.size() <= peers_.local_ranks().size() &&
         std::all_of(members.begin(), members.end(), [this](int member) { return peers_.is_local(member); });
}

bool OperationTable::are_all_quick() const {
  return std::all_of(running_.begin(), running_.end(), [this](const auto& each) { return is_quick(*each.second); });
}

std::vector<UnexpectedFrame> OperationTable::add(const std::shared_ptr<Operation>& operation) {
  const OperationKey key = operation->spec().key;
  running_[key] = operation;
  const auto found = unexpected_.find(key);
  if (found == unexpected_.end()) return {};
  auto frames = std::move(found->second);
  unexpected_.erase(found);
  return frames;
}

void OperationTable::end(const std::shared_ptr<Operation>& operation) {
  const auto& spec = operation->spec();
  running_.erase(spec.key);
  causes_.erase(spec.key);
  over(spec.key) = spec.key;
  ++ended_;
  recorder_.record({EventKind::operation, spec.name, spec.key, spec.user_bytes, nanoseconds(operation->posted),
                    nanoseconds(operation->agreed()), nanoseconds(operation->finished), first_bytes(spec.digest), 0, 0,
                    operation->fault()});
  if (spec.tells_mismatch && operation->fault() == FaultKind::mismatch) {
    control_.tell({ControlMessageKind::mismatch, state_.config.rank, spec.key.group, spec.key.sequence, {},
                 operation->descriptions()});
  }
  for (const auto& [start, end, busy] : operation->reductions()) {
    recorder_.keep({EventKind::reduce, spec.name, spec.key, 0, nanoseconds(start), 0, nanoseconds(end), 0,
                    std::chrono::duration_cast<std::chrono::nanoseconds>(busy).count()});
  }
  state_.changed.notify_all();
}

void OperationTable::note_ended_at_once(const OperationSpec& model, const OperationKey& key, int64_t start_ns,
                                        int64_t end_ns) {
  over(key) = key;
  recorder_.record({EventKind::operation, model.name, key, model.user_bytes, start_ns, end_ns, end_ns,
                    first_bytes(model.digest)});
  recorder_.record({EventKind::wait, model.name, key, 0, start_ns, 0, end_ns, 0, 0, recorder_.this_thread()});
}

void OperationTable::drop_unexpected(uint64_t group) {
  unexpected_.erase(unexpected_.lower_bound({group, 0}), unexpected_.upper_bound({group, UINT64_MAX}));
}

size_t OperationTable::unexpected_frames() const {
  size_t sum = 0;
  for (const auto& [key, frames] : unexpected_) sum += frames.size();
  return sum;
}

}  // namespace multiring
