#include "event_recorder.h"

#include <sys/syscall.h>
#include <unistd.h>

namespace multiring {

uint32_t EventRecorder::this_thread() const {
  if (!keeps_) return 0;
  static thread_local const auto number = static_cast<uint32_t>(::syscall(SYS_gettid));
  return number;
}

}  // namespace multiring
