#include "capture.h"

#include <utility>

#include "codes.h"

namespace standin {
namespace {

std::atomic<uint64_t> captures_made{0};
thread_local CaptureMode own_mode = CaptureMode::global;

}  // namespace

Capture::Capture(const Stream* origin, CaptureMode mode)
    : id_(++captures_made), origin_(origin), mode_(mode), thread_(std::this_thread::get_id()) {
  clocks_[origin];
}

bool Capture::is_valid() {
  const std::lock_guard lock(mutex_);
  return is_valid_;
}

void Capture::invalidate() {
  const std::lock_guard lock(mutex_);
  is_valid_ = false;
}

void Capture::add(const Stream* stream, WorkMaker maker) {
  const std::lock_guard lock(mutex_);
  graph_.nodes.push_back(std::move(maker));
  ++clocks_[stream][stream];
}

CaptureClock Capture::clock(const Stream* stream) {
  const std::lock_guard lock(mutex_);
  return clocks_[stream];
}

void Capture::join(const Stream* stream, const CaptureClock& before) {
  const std::lock_guard lock(mutex_);
  CaptureClock& own = clocks_[stream];
  for (const auto& [other, calls] : before) own[other] = std::max(own[other], calls);
}

bool Capture::has(const Stream* stream) {
  const std::lock_guard lock(mutex_);
  return clocks_.contains(stream);
}

bool Capture::is_joined() {
  const std::lock_guard lock(mutex_);
  CaptureClock& first = clocks_[origin_];
  for (auto& [stream, clock] : clocks_)
    if (first[stream] < clock[stream]) return false;
  return true;
}

Graph Capture::graph() {
  const std::lock_guard lock(mutex_);
  return graph_;
}

int Captures::begin(const Stream* stream, CaptureMode mode) {
  if (of(stream) != nullptr) return kInvalidValue;
  const std::lock_guard lock(mutex_);
  all_.insert(std::make_shared<Capture>(stream, mode));
  return kOk;
}

int Captures::end(const Stream* stream, Graph** made) {
  *made = nullptr;
  const CapturePointer capture = of(stream);
  if (capture == nullptr) return kInvalidValue;
  if (capture->origin() != stream) {
    capture->invalidate();
    return kCaptureUnmatched;
  }
  {
    const std::lock_guard lock(mutex_);
    all_.erase(capture);
  }
  if (!capture->is_valid()) return kCaptureInvalidated;
  if (!capture->is_joined()) return kCaptureUnjoined;
  *made = new Graph(capture->graph());
  return kOk;
}

CapturePointer Captures::of(const Stream* stream) {
  const std::lock_guard lock(mutex_);
  for (const CapturePointer& each : all_)
    if (each->has(stream)) return each;
  return nullptr;
}

bool Captures::has(const CapturePointer& capture) {
  const std::lock_guard lock(mutex_);
  return all_.contains(capture);
}

int Captures::refuse(const Stream* stream) {
  const CapturePointer own = stream == nullptr ? nullptr : of(stream);
  const std::lock_guard lock(mutex_);
  int code = kOk;
  for (const CapturePointer& each : all_) {
    const bool is_of_thread = each->thread() == std::this_thread::get_id() && each->mode() != CaptureMode::relaxed;
    const bool is_unsafe = (is_of_thread && own_mode != CaptureMode::relaxed) ||
                           (each->mode() == CaptureMode::global && own_mode == CaptureMode::global);
    if (each != own && !is_unsafe) continue;
    code = each->is_valid() ? kCaptureUnsupported : kCaptureInvalidated;
    each->invalidate();
  }
  return code;
}

CaptureMode Captures::exchange(CaptureMode mode) { return std::exchange(own_mode, mode); }

Captures& captures() {
  static auto* made = new Captures;
  return *made;
}

}  // namespace standin
