#include "repeated_calls.h"

namespace multiring {

void RepeatedCalls::remember(const CallShape& shape, const OperationSpec& spec) {
  if (context_.logs_moves()) return;  // repeated calls are not logged
  if (find(shape) != nullptr) return;
  if (known_.size() == kMostKept) known_.erase(known_.begin());
  known_.emplace_back(shape, spec);
}

RepeatedCalls::Attempt RepeatedCalls::attempt(const CallShape& shape, std::byte* data) {
  const OperationSpec* model = find(shape);
  if (model == nullptr) return {};
  if (pause_every_ != 0 && (sequence_.load() / steps_ + 1) % pause_every_ == 0) return {};
  if (!model->meets) return {.model = model};
  auto met = context_.meet(*model, {group_, sequence_, steps_}, data);
  return {met.is_done, std::move(met.operation), model};
}

OperationSpec RepeatedCalls::next_of(const OperationSpec& model) {
  OperationSpec spec = model;
  spec.key = {group_, next()};
  return spec;
}

OperationSpec RepeatedCalls::next_of(const OperationSpec& model, std::byte* data) {
  OperationSpec spec = next_of(model);
  spec.bases[1] = data;
  return spec;
}

const OperationSpec* RepeatedCalls::find(const CallShape& shape) const {
  for (auto at = known_.rbegin(); at != known_.rend(); ++at) {
    if (at->first == shape) return &at->second;
  }
  return nullptr;
}

}  // namespace multiring
