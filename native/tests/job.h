// A job whose ranks are threads of one process, and programs and operations for tests.
#pragma once

#include <arpa/inet.h>
#include <linux/filter.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "core/rank/context.h"
#include "core/memory/digest.h"

namespace multiring::checks {

struct Job {
  std::vector<std::unique_ptr<Context>> ranks;

  Job(int size, bool one_host, bool plain = false, bool logs = true, int rails = 1, double wire_timeout_s = 60,
      bool seal = false, bool votes = false, bool chain = false, uint16_t connections = 1) {
    for (int rank = 0; rank < size; ++rank) {
      ranks.push_back(std::make_unique<Context>(ContextConfig{
          .rank = rank, .size = size, .job = "test", .secret = "secret of sixteen", .segment_bytes = size_t{1} << 28,
          .stall_warn_s = 60, .stall_timeout_s = 60, .log_moves = logs, .lower = !plain, .read_peers = !plain,
          .rail_timeout_s = 0.4, .wire_timeout_s = wire_timeout_s, .seal = seal, .own_losses_only = votes}));
    }
    std::vector<PeerAddress> addresses;
    for (int rank = 0; rank < size; ++rank) {
      Context& context = *ranks[static_cast<size_t>(rank)];
      addresses.push_back({rank, one_host, context.handover_name(), {}, "host" + std::to_string(rank)});
      for (int rail = 0; rail < (one_host ? 0 : rails); ++rail) {
        const std::string host = "127.0.0." + std::to_string(rail + 1);
        addresses.back().rails.push_back({host, context.listen(host, 0, 0)});
      }
    }
    for (const auto& context : ranks) context->use_connections(connections);
    in_parallel([&](int rank) {
      std::vector<int> local;
      std::vector<int> neighbours;
      std::vector<PeerAddress> peers;
      for (int peer = 0; peer < size; ++peer) {
        if (one_host || peer == rank) local.push_back(peer);
        if (peer == rank) continue;
        if (!chain || std::abs(peer - rank) == 1) neighbours.push_back(peer);
        peers.push_back(addresses[static_cast<size_t>(peer)]);
      }
      ranks[static_cast<size_t>(rank)]->connect(peers, local, neighbours, 30, [] { return false; });
      ranks[static_cast<size_t>(rank)]->allow_spin(one_host ? 20e-6 : 0);
    });
  }

  int size() const { return static_cast<int>(ranks.size()); }
  Context& operator[](int rank) { return *ranks[static_cast<size_t>(rank)]; }

  void in_parallel(const std::function<void(int)>& work) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size(); ++rank) threads.emplace_back(work, rank);
    for (auto& thread : threads) thread.join();
  }
};

inline std::shared_ptr<const std::vector<Round>> rounds_of(int rank, int size, bool at_once) {
  auto rounds = std::make_shared<std::vector<Round>>();
  for (int distance = 1; distance < size; distance = at_once ? distance + 1 : distance * 2) {
    rounds->push_back({(rank + distance) % size, (rank + size - distance) % size});
  }
  return rounds;
}

// Returns a direct reduce_scatter followed by a direct all_gather of `count` int32 in place. The channels take the
// parts in turn.
inline std::shared_ptr<const Program> direct_all_reduce(int rank, int size, uint64_t count, uint16_t channels = 1) {
  auto program = std::make_shared<Program>();
  program->channels = channels;
  program->dtype = DType::i32;
  program->lowering = Lowering::slice;
  const auto at = [&](int part) { return count * static_cast<uint64_t>(part) / static_cast<uint64_t>(size) * 4; };
  std::vector<int> all;
  std::vector<int> others;
  for (int peer = 0; peer < size; ++peer) {
    all.push_back(peer);
    if (peer != rank) others.push_back(peer);
  }
  const auto move = [&](MoveKind kind, int part, std::vector<int> peers) {
    program->moves.push_back({.kind = kind, .last = kind == MoveKind::reduce,
                              .channel = static_cast<uint16_t>(part % channels), .source_space = 1,
                              .target_space = 1, .source_offset = at(part), .target_offset = at(part),
                              .size = at(part + 1) - at(part), .peers = std::move(peers)});
  };
  for (const int peer : others) move(MoveKind::send, peer, {peer});
  move(MoveKind::reduce, rank, all);
  move(MoveKind::send, rank, others);
  for (const int peer : others) move(MoveKind::copy, peer, {peer});
  return program;
}

inline OperationSpec spec_of(int rank, int size, uint64_t sequence, std::shared_ptr<const Program> program, void* data,
                      const std::string& description, bool at_once = false) {
  OperationSpec spec;
  spec.key = {1, sequence};
  spec.members.resize(static_cast<size_t>(size));
  std::iota(spec.members.begin(), spec.members.end(), 0);
  spec.rounds = rounds_of(rank, size, at_once);
  spec.at_once = at_once;
  const Sha256 digest = sha256(description);
  std::copy_n(digest.begin(), 16, spec.digest.begin());
  spec.description = description;
  spec.program = std::move(program);
  spec.bases = {nullptr, static_cast<std::byte*>(data)};
  if (spec.program) {
    for (const Move& move : spec.program->moves) {
      spec.user_bytes = std::max(spec.user_bytes, move.target_offset + move.size);
    }
  }
  return spec;
}

inline void wait_for(Context& context, const std::shared_ptr<Operation>& operation) {
  while (context.wait(operation, 5) != Context::Waited::ended) {
  }
}
// Has the kernel silently drop everything that arrives at a socket.
inline void silence(int fd) {
  sock_filter drop = BPF_STMT(BPF_RET | BPF_K, 0);
  const sock_fprog program{1, &drop};
  ::setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program);
}

// Cuts the wire of a rail at both ends.
inline void cut(int rail) {
  for (int fd = 3; fd < 1024; ++fd) {
    sockaddr_in own{};
    sockaddr_in other{};
    socklen_t length = sizeof own;
    if (::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length) != 0 || own.sin_family != AF_INET) continue;
    length = sizeof other;
    if (::getpeername(fd, reinterpret_cast<sockaddr*>(&other), &length) != 0) continue;
    const in_addr_t wanted = htonl(INADDR_LOOPBACK + static_cast<uint32_t>(rail));
    if (own.sin_addr.s_addr == wanted) silence(fd);
  }
}

// Returns the connected sockets of this process that are not among `known`.
inline std::set<int> connections(const std::set<int>& known = {}) {
  std::set<int> found;
  for (int fd = 3; fd < 1024; ++fd) {
    sockaddr_in other{};
    socklen_t length = sizeof other;
    const bool is_connected = ::getpeername(fd, reinterpret_cast<sockaddr*>(&other), &length) == 0;
    if (is_connected && other.sin_family == AF_INET && !known.contains(fd)) found.insert(fd);
  }
  return found;
}

}  // namespace multiring::checks
