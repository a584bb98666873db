// How a Context meets its peers: segments of its own host, connections to other hosts.

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "abstract_socket.h"
#include "context.h"
#include "digest.h"

namespace multiring {
namespace {

constexpr size_t kMostPending = 256;  // one more waits, or takes the place of the oldest
constexpr auto kHandshakePatience = std::chrono::seconds(5);
constexpr auto kYoung = std::chrono::seconds(1);  // for so long a caller keeps its place, however many others come
constexpr int kAcceptsATurn = 32;
constexpr auto kFullPause = std::chrono::milliseconds(10);
constexpr auto kNoDescriptorPause = std::chrono::milliseconds(100);
constexpr double kCallTimeout_s = 30;
constexpr int kLook_ms = 50;

bool send_with_memory(int socket, const Greeting& greeting, int memory) {
  iovec part{const_cast<Greeting*>(&greeting), sizeof greeting};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &memory, sizeof memory);
  return ::sendmsg(socket, &message, MSG_NOSIGNAL) == sizeof greeting;
}

bool receive_with_memory(int socket, Greeting& greeting, Descriptor& memory) {
  iovec part{&greeting, sizeof greeting};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t got = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  if (got < 0) return false;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    // Alignment leaves room for more than one: those that are too many are closed here.
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof fd, sizeof fd);
      memory = Descriptor(fd);
    }
  }
  errno = EPROTO;
  return got == sizeof greeting && memory.valid();
}

ucred credentials_of(int socket) {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) credentials.uid = static_cast<uid_t>(-1);
  return credentials;
}

bool same_user(int socket) { return credentials_of(socket).uid == ::geteuid(); }

}  // namespace

Sha256 Context::proof_of(int from, int to) const {
  return hmac_sha256(config_.secret,
                     "handover|" + config_.job + "|" + std::to_string(from) + "|" + std::to_string(to));
}

Doorbell::Word Context::doorbell_word_of(int rank) const {
  const Sha256 mac = hmac_sha256(config_.secret, "bell|" + config_.job + "|" + std::to_string(rank));
  Doorbell::Word word;
  std::copy_n(mac.begin(), word.size(), word.begin());
  return word;
}

Greeting Context::greeting_to(int peer) const {
  return {.rank = config_.rank,
          .proof = proof_of(config_.rank, peer),
          .witness_address = reinterpret_cast<uint64_t>(&witness_),
          .witness = witness_};
}

void Context::open_handover() {
  handover_socket_ = Descriptor(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!handover_socket_.valid()) throw_errno(FaultKind::state, "socket for handing over memory");
  const AbstractAddress address(handover_name_);
  if (::bind(handover_socket_.get(), address.get(), address.length) != 0 ||
      ::listen(handover_socket_.get(), static_cast<int>(kMaxLocalRanks)) != 0) {
    throw_errno(FaultKind::state, "listening at @" + handover_name_);
  }
}

uint16_t Context::listen(const std::string& host, uint16_t first_port, uint16_t last_port) {
  if (config_.secret.empty()) {
    throw Fault(FaultKind::state, "cannot listen at " + host + " without a secret: anybody could join");
  }
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_PASSIVE;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), "0", &hints, &found) != 0) {
    throw Fault(FaultKind::argument, "cannot listen at " + host + ": want a numeric address");
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> guard(found, ::freeaddrinfo);
  for (uint32_t port = first_port; port <= last_port; ++port) {
    Descriptor socket(::socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!socket.valid()) throw_errno(FaultKind::state, "socket");
    const int yes = 1;
    ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    sockaddr_storage address{};
    std::memcpy(&address, found->ai_addr, found->ai_addrlen);
    const uint16_t number = htons(static_cast<uint16_t>(port));
    if (found->ai_family == AF_INET6) {
      reinterpret_cast<sockaddr_in6*>(&address)->sin6_port = number;
    } else {
      reinterpret_cast<sockaddr_in*>(&address)->sin_port = number;
    }
    // Two that may reuse an address can both bind it; the second to listen is refused.
    if (::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), found->ai_addrlen) != 0 ||
        ::listen(socket.get(), 1024) != 0) {
      if (errno == EADDRINUSE && port < last_port) continue;
      throw_errno(FaultKind::argument, "binding " + host + ", ports " + std::to_string(first_port) + " to " +
                                           std::to_string(last_port));
    }
    socklen_t length = sizeof address;
    ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &length);
    const Lock lock(mutex_);
    listeners_.push_back({host, std::move(socket)});
    return ntohs(found->ai_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&address)->sin6_port
                                              : reinterpret_cast<sockaddr_in*>(&address)->sin_port);
  }
  throw Fault(FaultKind::argument, "an empty range of ports");
}

bool Context::connect(const std::vector<PeerAddress>& peers, const std::vector<int>& local_ranks,
                      const std::vector<int>& neighbours, double timeout_s,
                      const std::function<bool()>& interrupted) {
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s));
  if (local_ranks.size() > kMaxLocalRanks) {
    throw Fault(FaultKind::argument, std::to_string(local_ranks.size()) + " ranks on one host, at most " +
                                         std::to_string(kMaxLocalRanks) + " fit");
  }
  {
    const Lock lock(mutex_);
    for (const auto& peer : peers) addresses_[peer.rank] = peer;
    local_ranks_ = local_ranks;
    local_links_.assign(local_ranks.size(), nullptr);
    const auto own = std::find(local_ranks.begin(), local_ranks.end(), config_.rank);
    if (own == local_ranks.end()) throw Fault(FaultKind::argument, "the local ranks lack this rank");
    local_index_ = static_cast<uint32_t>(own - local_ranks.begin());
    neighbours_ = {neighbours.begin(), neighbours.end()};
    // Not before: who calls can only be told apart from anybody else once the ranks' addresses are known.
    poller_.add(handover_socket_.get(), EPOLLIN, [this](uint32_t) { on_handover_ready(); });
    for (const auto& listener : listeners_) {
      poller_.add(listener.socket.get(), EPOLLIN, [this, &listener](uint32_t) { on_caller(listener.socket); });
    }
    poller_.wake();
  }
  for (const int peer : local_ranks) {
    if (peer > config_.rank && !map_from(addresses_.at(peer), deadline, interrupted)) return false;
    if (interrupted()) return false;
  }
  Lock lock(mutex_);
  for (const int peer : neighbours) {
    if (std::find(local_ranks.begin(), local_ranks.end(), peer) == local_ranks.end()) link(peer);
  }
  const auto missing = [&] {
    std::vector<int> ranks;
    for (const int peer : local_ranks) {
      if (peer != config_.rank && links_[static_cast<size_t>(peer)] == nullptr) ranks.push_back(peer);
    }
    for (const auto& [peer, link] : tcp_links_) {
      if (!link->established()) ranks.push_back(peer);
    }
    return ranks;
  };
  for (auto ranks = missing(); !ranks.empty(); ranks = missing()) {
    drive();
    if (!broken_.empty()) throw Fault(FaultKind::rendezvous, broken_);
    for (const int rank : ranks) {
      const auto loss = losses_.find(rank);
      if (loss != losses_.end()) {
        throw Fault(FaultKind::rendezvous, "no connection with rank " + std::to_string(rank) + ": " + loss->second.why);
      }
    }
    if (Clock::now() >= deadline) {
      throw Fault(FaultKind::rendezvous, "no connection with rank " + std::to_string(ranks.front()) + " within " +
                                             std::to_string(static_cast<int64_t>(timeout_s)) + " s");
    }
    changed_.wait_for(lock, std::chrono::milliseconds(5));
    lock.unlock();
    const bool stop = interrupted();
    lock.lock();
    if (stop) return false;
  }
  for (const auto& [peer, link] : tcp_links_) {
    for (const uint16_t rail : link->rails_not_up()) {
      throw Fault(FaultKind::rendezvous, "no connection with rank " + std::to_string(peer) + " over rail " +
                                             std::to_string(rail) + ", from " + listeners_[rail].host + " to " +
                                             addresses_.at(peer).rails[rail].host);
    }
  }
  connected_ = true;
  poller_.remove(handover_socket_.get());
  handover_socket_.reset();
  for (const auto& [fd, pending] : pending_handovers_) poller_.remove(fd);  // ranks have said who they are by now
  pending_handovers_.clear();
  return true;
}

// ---- one host ------------------------------------------------------------------------------

bool Context::map_from(const PeerAddress& peer, Clock::time_point deadline, const std::function<bool()>& interrupted) {
  const std::string whom = "rank " + std::to_string(peer.rank) + " of this host";
  Descriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.valid()) throw_errno(FaultKind::rendezvous, "socket");
  // Signals come, and other ranks give up, while a peer is waited for.
  const auto lets = [&](const char* doing, short until, const auto& call) {
    while (!call()) {
      if (errno != EAGAIN && errno != EINTR) throw_errno(FaultKind::rendezvous, doing + whom);
      if (Clock::now() >= deadline) throw Fault(FaultKind::rendezvous, doing + whom + ": it has not answered in time");
      pollfd waited{socket.get(), until, 0};
      ::poll(&waited, until == 0 ? 0 : 1, kLook_ms);
      if (interrupted()) return false;
    }
    return true;
  };
  const AbstractAddress address(peer.handover);
  const auto connects = [&] { return ::connect(socket.get(), address.get(), address.length) == 0; };
  if (!lets("connecting to ", 0, connects)) return false;
  if (!same_user(socket.get())) {
    throw Fault(FaultKind::rendezvous, whom + " runs as another user; all ranks of a host must be one user's");
  }
  Greeting mine = greeting_to(peer.rank);
  mine.keep = neighbours_.contains(peer.rank) ? 1U : 0U;
  Greeting theirs;
  Descriptor memory;
  constexpr const char* kExchanging = "exchanging memory with ";
  const auto sends = [&] { return send_with_memory(socket.get(), mine, segment_->fd()); };
  const auto receives = [&] { return receive_with_memory(socket.get(), theirs, memory); };
  if (!lets(kExchanging, POLLOUT, sends) || !lets(kExchanging, POLLIN, receives)) return false;
  if (theirs.rank != peer.rank || !equal_in_constant_time(theirs.proof, proof_of(peer.rank, config_.rank))) {
    throw Fault(FaultKind::rendezvous, whom + " has another secret");
  }
  const Lock lock(mutex_);
  adopt_memory(memory, theirs, credentials_of(socket.get()).pid);
  if (mine.keep != 0) watch(peer.rank, std::move(socket));
  return true;
}

void Context::on_handover_ready() {
  for (;;) {
    Descriptor pending(::accept4(handover_socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!pending.valid()) return;
    if (!same_user(pending.get())) continue;
    const int fd = pending.get();
    pending_handovers_[fd] = std::move(pending);
    poller_.add(fd, EPOLLIN, [this, fd](uint32_t) { on_pending_handover(fd); });
  }
}

void Context::on_pending_handover(int fd) {
  Descriptor socket = std::move(pending_handovers_.at(fd));
  pending_handovers_.erase(fd);
  poller_.remove(fd);
  Greeting theirs;
  Descriptor memory;
  if (!receive_with_memory(socket.get(), theirs, memory)) return;
  const bool local = std::find(local_ranks_.begin(), local_ranks_.end(), theirs.rank) != local_ranks_.end();
  if (!local || theirs.rank >= config_.rank || links_[static_cast<size_t>(theirs.rank)] != nullptr) return;
  if (!equal_in_constant_time(theirs.proof, proof_of(theirs.rank, config_.rank))) return;
  Greeting mine = greeting_to(theirs.rank);
  mine.keep = theirs.keep;
  adopt_memory(memory, theirs, credentials_of(socket.get()).pid);
  if (send_with_memory(socket.get(), mine, segment_->fd()) && theirs.keep != 0) watch(theirs.rank, std::move(socket));
  changed_.notify_all();
}

void Context::adopt_memory(const Descriptor& memory, const Greeting& theirs, int pid) {
  const int peer = theirs.rank;
  struct stat status {};
  if (::fstat(memory.get(), &status) != 0 || static_cast<size_t>(status.st_size) <= Mapping::kHeapStart) {
    throw Fault(FaultKind::rendezvous, "rank " + std::to_string(peer) + " handed over something that is no segment");
  }
  const auto at = std::find(local_ranks_.begin(), local_ranks_.end(), peer);
  ShmLink::Ends ends{
      .own = segment_,
      .beside = shm_buffers_,
      .theirs = std::make_unique<Mapping>(memory.get(), static_cast<size_t>(status.st_size)),
      .own_index = local_index_,
      .their_index = static_cast<uint32_t>(at - local_ranks_.begin()),
      .their_doorbell = addresses_.at(peer).handover + "-bell",
      .their_doorbell_word = doorbell_word_of(peer),
      .their_pid = config_.read_peers ? pid : 0,
      .their_witness = theirs.witness_address,
      .their_witness_value = theirs.witness,
  };
  auto link = std::make_unique<ShmLink>(peer, *this, *doorbell_, std::move(ends));
  local_links_[link->their_index()] = link.get();
  links_[static_cast<size_t>(peer)] = std::move(link);
}

void Context::watch(int peer, Descriptor socket) {
  const int fd = socket.get();
  watches_[peer] = std::move(socket);
  poller_.add(fd, EPOLLIN | EPOLLRDHUP, [this, peer](uint32_t) { on_watch_ready(peer); });
}

void Context::on_watch_ready(int peer) {
  const auto found = watches_.find(peer);
  if (found == watches_.end()) return;
  char word = 0;
  const ssize_t got = ::recv(found->second.get(), &word, 1, MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got > 0) {
    on_loss(peer, LossKind::left, "it ended normally or called shutdown");
    return;
  }
  poller_.remove(found->second.get());
  watches_.erase(found);
  on_loss(peer, LossKind::died, "its process ended");
}

// ---- between hosts -------------------------------------------------------------------------

TcpLink& Context::tcp_link(int peer) {
  const auto found = addresses_.find(peer);
  const size_t rails = listeners_.size();
  if (found == addresses_.end() || found->second.rails.empty() || found->second.rails.size() != rails) {
    throw Fault(FaultKind::state, "rank " + std::to_string(peer) + " gave no address to connect to");
  }
  TcpLink& link = make_link(peer);
  tcp_links_[peer] = &link;
  // The lower rank calls, the higher one waits to be called: both know that they belong together.
  if (config_.rank < peer) {
    const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(kCallTimeout_s));
    for (uint16_t rail = 0; rail < rails; ++rail) {
      const auto& [host, port] = found->second.rails[rail];
      link.call(rail, host, port, rails > 1 ? listeners_[rail].host : "", self_on(rail), deadline);
    }
  }
  return link;
}

TcpLink& Context::make_link(int peer) {
  auto& place = links_[static_cast<size_t>(peer)];
  const TcpLink::Rails rails{static_cast<uint16_t>(listeners_.size()),
                             as_duration(config_.rail_timeout_s), as_duration(config_.wire_timeout_s), pool_};
  if (config_.by_mpi) {
    auto made = std::make_unique<MpiLink>(peer, *this, poller_, rails, proxy_);
    TcpLink& connection = made->connection();
    mpi_links_[peer] = made.get();
    place = std::move(made);
    return connection;
  }
  auto made = std::make_unique<TcpLink>(peer, *this, poller_, rails);
  TcpLink& link = *made;
  place = std::move(made);
  return link;
}

Handshake::Self Context::self_on(uint16_t rail) const {
  return {config_.rank, config_.size, config_.job, config_.secret, static_cast<uint16_t>(listeners_.size()), rail};
}

// Callers cost a bounded number of descriptors, and nobody's place is taken before it could have proven itself: a rank
// proves itself within milliseconds of being heard. Those for whom there is no room wait in the kernel's queue, and a
// rank whose connection is dropped after all calls again.
void Context::on_caller(const Descriptor& listener) {
  for (int turn = 0; turn < kAcceptsATurn; ++turn) {
    if (pending_handshakes_.size() >= kMostPending && !make_room_for_caller()) {
      rest_listeners(kFullPause);
      return;
    }
    Descriptor socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.valid()) {
      if (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED) return;
      // Out of descriptors or memory: the waiting connection would wake us again and again.
      if (!make_room_for_caller()) rest_listeners(kNoDescriptorPause);
      return;
    }
    const int fd = socket.get();
    pending_handshakes_[fd] = std::make_unique<Handshake>(
        std::move(socket), self_on(0), Handshake::kAnyone, Clock::now() + kHandshakePatience);
    try {
      poller_.add(fd, EPOLLIN, [this, fd](uint32_t) { on_handshake(fd); });
    } catch (const Fault&) {  // nothing to watch it with: it may come again
      pending_handshakes_.erase(fd);
      return;
    }
    on_handshake(fd);  // its first words are here more often than not
  }
}

// False: the oldest has not been here for long, and who comes has to wait.
bool Context::make_room_for_caller() {
  const auto oldest = std::min_element(pending_handshakes_.begin(), pending_handshakes_.end(), [](const auto& a, const auto& b) {
    return a.second->deadline() < b.second->deadline();
  });
  if (oldest == pending_handshakes_.end()) return false;
  const int fd = oldest->first;
  const auto came = oldest->second->deadline() - kHandshakePatience;
  on_handshake(fd);  // it may have proven itself while nobody had time to listen
  if (!pending_handshakes_.contains(fd)) return true;
  if (Clock::now() < came + kYoung) return false;
  drop_pending(fd);
  return true;
}

void Context::drop_pending(int fd) {
  poller_.remove(fd);
  pending_handshakes_.erase(fd);
}

void Context::rest_listeners(Clock::duration pause) {
  if (!listens_again_) {
    for (const auto& listener : listeners_) poller_.remove(listener.socket.get());
  }
  listens_again_ = Clock::now() + pause;
}

void Context::listen_again() {
  listens_again_.reset();
  size_t heard = 0;
  try {
    for (const auto& listener : listeners_) {
      poller_.add(listener.socket.get(), EPOLLIN, [this, &listener](uint32_t) { on_caller(listener.socket); });
      ++heard;
    }
  } catch (const Fault&) {  // nothing to watch it with
    for (size_t i = 0; i < heard; ++i) poller_.remove(listeners_[i].socket.get());
    listens_again_ = Clock::now() + kNoDescriptorPause;
  }
}

void Context::tend_calls() {
  for (const auto& [rank, link] : tcp_links_) link->tend_calls();
}

bool Context::is_calling() const {
  return std::any_of(tcp_links_.begin(), tcp_links_.end(), [](const auto& entry) { return entry.second->is_calling(); });
}

void Context::on_handshake(int fd) {
  Handshake& handshake = *pending_handshakes_.at(fd);
  const auto status = handshake.advance();
  if (status == Handshake::Status::going) return;
  poller_.remove(fd);
  const auto over = std::move(pending_handshakes_.at(fd));
  pending_handshakes_.erase(fd);
  if (status == Handshake::Status::refused) return;
  const int peer = over->peer();
  const auto& known = addresses_.find(peer);
  if (peer >= config_.rank || known == addresses_.end() || known->second.same_host) return;
  auto& link = links_[static_cast<size_t>(peer)];
  TcpLink& mine = link ? *tcp_links_.at(peer) : tcp_link(peer);
  const uint16_t rail = over->rail();
  if (mine.awaits(rail) && !losses_.contains(peer)) mine.adopt(rail, over->release());
  changed_.notify_all();
}

void Context::expire_pending() {
  const auto now = Clock::now();
  std::vector<int> late;
  for (const auto& [fd, handshake] : pending_handshakes_) {
    if (now >= handshake->deadline()) late.push_back(fd);
  }
  for (const int fd : late) {
    on_handshake(fd);  // this process may have stood still meanwhile
    if (pending_handshakes_.contains(fd)) drop_pending(fd);
  }
}

}  // namespace multiring
