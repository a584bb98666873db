#include "quieting.h"

namespace multiring {
namespace {

constexpr auto kPatience = std::chrono::seconds(5);  // bounded, because a stopped process does not answer

}  // namespace

void Quieting::begin() {
  for (const int peer : operation_.spec.members) {
    const bool may_write = peer != operation_.rank() && operation_.host.shares_memory(peer);
    if (may_write && !operation_.failed_peers.contains(peer)) loud_.insert(peer);
  }
  until_ = Clock::now() + kPatience;
}

bool Quieting::is_over() {
  std::erase_if(loud_, [this](int peer) { return !operation_.host.shares_memory(peer); });
  return loud_.empty() || Clock::now() >= until_;
}

std::string Quieting::end() {
  if (loud_.empty()) return "";
  std::string who;
  for (const int peer : loud_) who += (who.empty() ? "" : ", ") + std::to_string(peer);
  operation_.host.segment().quarantine(operation_.spec.bases[1]);
  return "; rank " + who + " has not answered since, and may still write into this rank's array";
}

}  // namespace multiring
