// An all_reduce whose moves send little: what each sends travels with the agreement, so that no agreement comes before.
//
// Whoever hears of a rank that does not come this way, or means something else, turns back to agreeing, and by its
// rounds turns back others. Nobody can have written its buffer by then: what makes a part complete has come from all of
// them, and on its way passed only ranks whose descriptors were equal. So whoever wrote one part can go on with the
// others: nobody turns back any more. Guarded by RankState::mutex; whichever thread drives calls it.
#pragma once

#include <compare>
#include <map>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "agreement.h"
#include "operation_record.h"

namespace multiring {

class EagerExecution {
 public:
  EagerExecution(OperationRecord& operation, Agreement& agreement) : operation_(operation), agreement_(agreement) {}

  void on_round(int peer, const Frame& frame, std::span<const std::byte> payload);
  enum class Outcome : uint8_t { waits, done, turned_back };
  Outcome advance(bool& moved);
  std::set<int> waiting_for() const;

 private:
  struct Message {
    Frame frame;
    std::vector<std::byte> payload;
  };
  // Messages as moves have them: the n-th sent on a line is the n-th taken.
  struct Line {
    int peer;
    uint16_t channel;
    auto operator<=>(const Line&) const = default;
  };
  void send(const Move& move);
  bool take(const Move& move);

  OperationRecord& operation_;
  Agreement& agreement_;
  bool is_open_ = false;
  Lane lane_{.slot = 0, .segment = 0};
  std::map<std::pair<Line, uint8_t>, Message> came_;  // by their place on their line
  std::map<Line, uint8_t> sent_;
  std::map<Line, uint8_t> taken_;
};

}  // namespace multiring
