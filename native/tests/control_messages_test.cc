// Tests messages outside any operation, and notifications of mismatches and losses. Meant to run under TSan and ASan.

#include "core/rank/context.h"

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

// Every rank sends messages to every other rank while operations run.
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
          check(message.kind == ControlMessageKind::message && message.group == 7 &&
                    message.tag == next[message.rank]++,
                "control messages arrive in order");
          const bool right = message.tag % 50 == 0
                                 ? message.payload == std::string(kNoteBytes, static_cast<char>('a' + message.rank))
                                 : message.payload == std::string(message.tag % 3, 'x');
          check(right, "a control message arrives with its payload");
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
                  "a control message is sent");
            break;
          } catch (const Fault&) {  // the limit of unacknowledged messages is reached
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

// A listener is notified of a mismatch without a waiting caller, of losses, and of the end. A rank that takes no
// messages is sent no more.
void news(bool one_host) {
  Job job(3, one_host);
  job.in_parallel([&](int rank) {
    OperationSpec spec = spec_of(rank, 3, 4, nullptr, nullptr, "meant by " + std::to_string(rank), one_host);
    spec.tells_mismatch = true;
    job[rank].post(std::move(spec), false);
    const auto taken = take_some(job[rank]);
    check(taken.size() == 1 && taken[0].kind == ControlMessageKind::mismatch, "a mismatch is reported");
    check(taken[0].group == 1 && taken[0].tag == 4 && taken[0].titles.at(2) == "meant by 2",
          "the report has the description of each rank");
  });
  bool refused = false;
  for (uint64_t i = 0; i <= ControlMessages::kMostWaiting.count && !refused; ++i) {
    try {
      job[0].notify(1, 1, i, {});
    } catch (const Fault& fault) {
      refused = fault.kind() == FaultKind::state && i == ControlMessages::kMostWaiting.count;
    }
  }
  check(refused, "messages beyond the limit are rejected");
  check(take_some(job[1]).front().tag == 0, "messages up to the limit wait in order");
  job[2].close(0, true);
  for (const int rank : {0, 1}) {
    bool told = false;
    while (!told) {
      for (const ControlMessage& message : take_some(job[rank])) {
        if (message.kind != ControlMessageKind::loss) continue;
        check(message.rank == 2 && message.tag == static_cast<uint64_t>(LossKind::left), "a departure is reported");
        told = true;
      }
    }
    check(!job[rank].notify(2, 1, 0, {}), "a rank that left is sent nothing");
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
