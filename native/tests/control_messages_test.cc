// Messages outside any operation, and news of mismatches and losses; made for TSan and ASan.

#include "core/context.h"

#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <numeric>
#include <thread>

#include "checks.h"
#include "job.h"

using namespace multiring;
using namespace multiring::checks;

namespace {

std::vector<ControlMessage> take_some(Context& context) {
  for (;;) {
    auto taken = context.take_control_messages(5);
    if (!taken || !taken->empty()) return taken ? std::move(*taken) : std::vector<ControlMessage>{};
  }
}

std::span<const std::byte> bytes_of(const std::string& text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

// Every rank writes to every other, in order, outside any operation; beside it operations go on.
void messages(bool one_host) {
  constexpr int kSize = 3;
  constexpr uint64_t kCount = 200;
  Job job(kSize, one_host);
  job.in_parallel([&](int rank) {
    Context& context = job[rank];
    const std::string large(kNoteBytes, static_cast<char>('a' + rank));
    std::thread listener([&] {
      std::map<int, uint64_t> next;
      for (uint64_t got = 0; got < kCount * (kSize - 1);) {
        for (const ControlMessage& message : take_some(context)) {
          check(message.kind == ControlMessage::Kind::message && message.group == 7 &&
                    message.tag == next[message.rank]++,
                "notices come in order");
          const bool right = message.tag % 50 == 0
                                 ? message.payload == std::string(kNoteBytes, static_cast<char>('a' + message.rank))
                                 : message.payload == std::string(message.tag % 3, 'x');
          check(right, "a notice brings what was sent");
          ++got;
        }
      }
    });
    std::vector<int32_t> data(1000, rank);
    for (uint64_t i = 0; i < kCount; ++i) {
      for (int peer = 0; peer < kSize; ++peer) {
        if (peer == rank) continue;
        while (true) {
          try {
            check(context.notify(peer, 7, i, bytes_of(i % 50 == 0 ? large : std::string(i % 3, 'x'))),
                  "a notice is sent");
            break;
          } catch (const Fault&) {  // as many wait as may
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
          }
        }
      }
      if (i % 20 == 0) {
        wait_for(context, context.post(spec_of(rank, kSize, i, direct_all_reduce(rank, kSize, 1000), data.data(), "sum",
                                               one_host),
                                       true));
      }
    }
    listener.join();
  });
}

// A listener hears of a mismatch nobody waits for, of losses, and of the end; who takes nothing is sent no more.
void news(bool one_host) {
  Job job(3, one_host);
  job.in_parallel([&](int rank) {
    OperationSpec spec = spec_of(rank, 3, 4, nullptr, nullptr, "meant by " + std::to_string(rank), one_host);
    spec.tells_mismatch = true;
    job[rank].post(std::move(spec), false);
    const auto taken = take_some(job[rank]);
    check(taken.size() == 1 && taken[0].kind == ControlMessage::Kind::mismatch, "a mismatch is told of");
    check(taken[0].group == 1 && taken[0].tag == 4 && taken[0].titles.at(2) == "meant by 2",
          "it says what each rank meant");
  });
  bool refused = false;
  for (uint64_t i = 0; i <= ControlMessages::kMostWaiting.count && !refused; ++i) {
    try {
      job[0].notify(1, 1, i, {});
    } catch (const Fault& fault) {
      refused = fault.kind() == FaultKind::state && i == ControlMessages::kMostWaiting.count;
    }
  }
  check(refused, "more notices than may wait are refused");
  check(take_some(job[1]).front().tag == 0, "those before wait in order");
  job[2].close(0, true);
  for (const int rank : {0, 1}) {
    bool told = false;
    while (!told) {
      for (const ControlMessage& message : take_some(job[rank])) {
        if (message.kind != ControlMessage::Kind::loss) continue;
        check(message.rank == 2 && message.tag == static_cast<uint64_t>(LossKind::left), "a rank that left is told of");
        told = true;
      }
    }
    check(!job[rank].notify(2, 1, 0, {}), "and is sent nothing");
  }
  std::thread closer([&] { job[0].close(0, false); });
  while (job[0].take_control_messages(5)) {
  }
  closer.join();
}

}  // namespace

int main() {
  for (const bool one_host : {true, false}) {
    messages(one_host);
    news(one_host);
  }
  return result();
}
