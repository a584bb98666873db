#include "reduction_times.h"

namespace multiring {

void ReductionTimes::add(Clock::time_point start, Clock::time_point end) {
  if (!stretches_.empty() && start - stretches_.back().end <= joined_) {
    stretches_.back().end = end;
    stretches_.back().busy += end - start;
    return;
  }
  stretches_.push_back({start, end, end - start});
  while (stretches_.size() > kMost) {
    joined_ *= 2;
    std::vector<Stretch> fewer;
    for (const Stretch& each : stretches_) {
      if (fewer.empty() || each.start - fewer.back().end > joined_) {
        fewer.push_back(each);
      } else {
        fewer.back().end = each.end;
        fewer.back().busy += each.busy;
      }
    }
    stretches_ = std::move(fewer);
  }
}

}  // namespace multiring
