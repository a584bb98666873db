#include "segment_handover.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "memory/abstract_socket.h"

namespace multiring {
namespace {

constexpr int kLook_ms = 50;
constexpr auto kHandoverPause = std::chrono::milliseconds(5);

std::string random_name() {
  std::string name = "multiring-";
  for (const uint8_t byte : random_nonce()) {
    name.push_back("0123456789abcdef"[byte / 16]);
    name.push_back("0123456789abcdef"[byte % 16]);
  }
  return name;
}

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
    // Because of alignment, the buffer has room for more than one descriptor. Surplus descriptors are closed here.
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
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0)
    credentials.uid = static_cast<uid_t>(-1);
  return credentials;
}

bool same_user(int socket) { return credentials_of(socket).uid == ::geteuid(); }

}  // namespace

SegmentHandover::SegmentHandover(RankState& state, Peers& peers, FailureDetector& detector, LinkEvents& events)
    : state_(state), peers_(peers), detector_(detector), events_(events), name_(random_name()) {
  const auto nonce = random_nonce();
  std::memcpy(&witness_, nonce.data(), sizeof witness_);
  doorbell_ = std::make_unique<Doorbell>(name_ + "-bell", doorbell_word_of(state_.config.rank));
  state_.poller.add(doorbell_->fd(), EPOLLIN, [this](uint32_t) { doorbell_->silence(); });
  listen();
}

void SegmentHandover::open() {
  state_.poller.add(socket_.get(), EPOLLIN, [this](uint32_t) { on_ready(); });
}

void SegmentHandover::close() {
  state_.poller.remove(socket_.get());
  socket_.reset();
  for (const auto& [fd, pending] : pending_) state_.poller.remove(fd);  // not ranks: all ranks have connected
  pending_.clear();
}

Sha256 SegmentHandover::proof_of(int from, int to) const {
  return hmac_sha256(state_.config.secret,
                     "handover|" + state_.config.job + "|" + std::to_string(from) + "|" + std::to_string(to));
}

Doorbell::Word SegmentHandover::doorbell_word_of(int rank) const {
  const Sha256 mac = hmac_sha256(state_.config.secret, "bell|" + state_.config.job + "|" + std::to_string(rank));
  Doorbell::Word word;
  std::copy_n(mac.begin(), word.size(), word.begin());
  return word;
}

Greeting SegmentHandover::greeting_to(int peer) const {
  return {.rank = state_.config.rank,
          .proof = proof_of(state_.config.rank, peer),
          .witness_address = reinterpret_cast<uint64_t>(&witness_),
          .witness = witness_};
}

void SegmentHandover::listen() {
  socket_ = Descriptor(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket_.valid()) throw_errno(FaultKind::state, "socket for handing over memory");
  const AbstractAddress address(name_);
  if (::bind(socket_.get(), address.get(), address.length) != 0 ||
      ::listen(socket_.get(), static_cast<int>(kMaxLocalRanks)) != 0) {
    throw_errno(FaultKind::state, "listening at @" + name_);
  }
}

bool SegmentHandover::map_from(const PeerAddress& peer, bool keeps, Clock::time_point deadline,
                               const std::function<bool()>& interrupted) {
  const std::string whom = "rank " + std::to_string(peer.rank) + " of this host";
  Descriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.valid()) throw_errno(FaultKind::rendezvous, "socket");
  // Repeats `call` until it succeeds. Between the attempts it checks for the deadline, signals and failures of ranks.
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
    throw Fault(FaultKind::rendezvous, whom + " runs as another user; all ranks of a host must belong to one user");
  }
  Greeting mine = greeting_to(peer.rank);
  mine.keep = keeps ? 1U : 0U;
  Greeting theirs;
  Descriptor memory;
  constexpr const char* kExchanging = "exchanging memory with ";
  const auto sends = [&] { return send_with_memory(socket.get(), mine, state_.segment->fd()); };
  const auto receives = [&] { return receive_with_memory(socket.get(), theirs, memory); };
  if (!lets(kExchanging, POLLOUT, sends) || !lets(kExchanging, POLLIN, receives)) return false;
  if (theirs.rank != peer.rank || !equal_in_constant_time(theirs.proof, proof_of(peer.rank, state_.config.rank))) {
    throw Fault(FaultKind::rendezvous, whom + " has another secret");
  }
  const RankState::Lock lock(state_.mutex);
  adopt_memory(memory, theirs, credentials_of(socket.get()).pid);
  if (mine.keep != 0) detector_.watch(peer.rank, std::move(socket));
  return true;
}

void SegmentHandover::on_ready() {
  for (;;) {
    Descriptor pending(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!pending.valid()) {
      // The process is out of descriptors or memory, and the waiting rank would wake this thread repeatedly.
      if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) std::this_thread::sleep_for(kHandoverPause);
      return;
    }
    if (!same_user(pending.get())) continue;
    const int fd = pending.get();
    pending_[fd] = std::move(pending);
    try {
      state_.poller.add(fd, EPOLLIN, [this, fd](uint32_t) { on_pending(fd); });
    } catch (const Fault&) {  // the poller cannot watch it; that rank's call fails with an error
      pending_.erase(fd);
    }
  }
}

void SegmentHandover::on_pending(int fd) {
  Descriptor socket = std::move(pending_.at(fd));
  pending_.erase(fd);
  state_.poller.remove(fd);
  Greeting theirs;
  Descriptor memory;
  if (!receive_with_memory(socket.get(), theirs, memory)) return;
  if (!peers_.is_local(theirs.rank) || theirs.rank >= state_.config.rank || peers_.link(theirs.rank) != nullptr) return;
  if (!equal_in_constant_time(theirs.proof, proof_of(theirs.rank, state_.config.rank))) return;
  Greeting mine = greeting_to(theirs.rank);
  mine.keep = theirs.keep;
  adopt_memory(memory, theirs, credentials_of(socket.get()).pid);
  if (send_with_memory(socket.get(), mine, state_.segment->fd()) && theirs.keep != 0)
    detector_.watch(theirs.rank, std::move(socket));
  state_.changed.notify_all();
}

void SegmentHandover::adopt_memory(const Descriptor& memory, const Greeting& theirs, int pid) {
  const int peer = theirs.rank;
  struct stat status {};
  if (::fstat(memory.get(), &status) != 0 || static_cast<size_t>(status.st_size) <= Mapping::kHeapStart) {
    throw Fault(FaultKind::rendezvous, "rank " + std::to_string(peer) + " handed over memory that is not a segment");
  }
  ShmLink::Ends ends{
      .own = state_.segment,
      .beside = buffers_,
      .theirs = std::make_unique<Mapping>(memory.get(), static_cast<size_t>(status.st_size)),
      .own_index = peers_.local_index_of(state_.config.rank),
      .their_index = peers_.local_index_of(peer),
      .their_doorbell = peers_.address_of(peer)->handover + "-bell",
      .their_doorbell_word = doorbell_word_of(peer),
      .their_pid = state_.config.read_peers ? pid : 0,
      .their_witness = theirs.witness_address,
      .their_witness_value = theirs.witness,
  };
  peers_.add(std::make_unique<ShmLink>(peer, events_, *doorbell_, std::move(ends)));
}

}  // namespace multiring
