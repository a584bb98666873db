#include "peers.h"

#include <algorithm>

namespace multiring {

void Peers::know(const std::vector<PeerAddress>& addresses, const std::vector<int>& local_ranks) {
  for (const auto& peer : addresses) addresses_[peer.rank] = peer;
  local_ranks_ = local_ranks;
  local_links_.assign(local_ranks.size(), nullptr);
  if (!is_local(state_.config.rank)) throw Fault(FaultKind::argument, "local_ranks does not contain this rank");
}

const PeerAddress* Peers::address_of(int rank) const {
  const auto found = addresses_.find(rank);
  return found == addresses_.end() ? nullptr : &found->second;
}

const std::string& Peers::place_of(int rank) const {
  static const std::string unknown = "its host";
  const PeerAddress* found = address_of(rank);
  return found == nullptr || found->host.empty() ? unknown : found->host;
}

uint32_t Peers::local_index_of(int rank) const {
  return static_cast<uint32_t>(std::find(local_ranks_.begin(), local_ranks_.end(), rank) - local_ranks_.begin());
}

void Peers::add(std::unique_ptr<ShmLink> link) {
  local_links_[link->their_index()] = link.get();
  links_[static_cast<size_t>(link->peer())] = std::move(link);
}

TcpLink& Peers::add(std::unique_ptr<TcpLink> link) {
  TcpLink& made = *link;
  links_[static_cast<size_t>(made.peer())] = std::move(link);
  tcp_links_[made.peer()] = &made;
  return made;
}

TcpLink& Peers::add(std::unique_ptr<MpiLink> link) {
  MpiLink& made = *link;
  links_[static_cast<size_t>(made.peer())] = std::move(link);
  mpi_links_[made.peer()] = &made;
  tcp_links_[made.peer()] = &made.connection();
  return made.connection();
}

TcpLink* Peers::connection(int rank) const {
  const auto found = tcp_links_.find(rank);
  return found == tcp_links_.end() ? nullptr : found->second;
}

MpiLink* Peers::by_mpi(int rank) const {
  const auto found = mpi_links_.find(rank);
  return found == mpi_links_.end() ? nullptr : found->second;
}

bool Peers::receive_local() {
  ControlPage& control = state_.segment->mapping().control();
  bool any = false;
  for (size_t word = 0; word * 64 < local_links_.size(); ++word) {
    uint64_t bits = control.pending[word].load(std::memory_order_relaxed);
    if (bits == 0) continue;
    bits = control.pending[word].exchange(0, std::memory_order_seq_cst);
    while (bits != 0) {
      const auto index = word * 64 + static_cast<size_t>(__builtin_ctzll(bits));
      bits &= bits - 1;
      if (index < local_links_.size() && local_links_[index] != nullptr) any |= local_links_[index]->receive();
    }
  }
  return any;
}

bool Peers::pump() {
  bool any = false;
  for (const auto& link : links_) {
    if (link) any |= link->pump();
  }
  return any;
}

void Peers::pump_local() {
  for (ShmLink* link : local_links_) {
    if (link != nullptr) link->pump();
  }
}

bool Peers::congested() const {
  return std::any_of(local_links_.begin(), local_links_.end(), [this](const ShmLink* link) {
    return link != nullptr && link->congested() && !is_lost(link->peer());
  });
}

bool Peers::hands_on() const {
  return std::any_of(tcp_links_.begin(), tcp_links_.end(),
                     [this](const auto& entry) { return !is_lost(entry.first) && entry.second->holds_frames(); });
}

bool Peers::is_sending() const {
  return std::any_of(tcp_links_.begin(), tcp_links_.end(),
                     [this](const auto& entry) { return !is_lost(entry.first) && entry.second->is_sending(); });
}

size_t Peers::in_transit() const {
  size_t sum = 0;
  for (const auto& [peer, link] : tcp_links_) sum += link->in_transit();
  return sum;
}

bool Peers::is_calling() const {
  return std::any_of(tcp_links_.begin(), tcp_links_.end(),
                     [](const auto& entry) { return entry.second->is_calling(); });
}

void Peers::tell_everyone(const Frame& frame) {
  for (const auto& link : links_) {
    if (link && !is_lost(link->peer())) link->send(frame);
  }
}

bool Peers::lose(int rank, const Loss& loss) {
  if (!losses_.try_emplace(rank, loss).second) return false;
  lost_in_order_.push_back(rank);
  return true;
}

bool Peers::any_died() const {
  return std::any_of(losses_.begin(), losses_.end(), [](const auto& loss) { return is_death(loss.second.kind); });
}

std::vector<std::pair<int, uint64_t>> Peers::goodputs() const {
  std::vector<std::pair<int, uint64_t>> found;
  for (const auto& [peer, link] : tcp_links_) {
    const MpiLink* carrier = by_mpi(peer);
    const uint64_t rate = carrier != nullptr ? carrier->goodput() : link->goodput();
    if (rate != 0) found.emplace_back(peer, rate);
  }
  return found;
}

std::vector<RailStatus> Peers::rails() const {
  std::vector<RailStatus> found;
  for (const auto& [peer, link] : tcp_links_) {
    for (const RailStatus& rail : link->rails()) found.push_back(rail);
  }
  return found;
}

std::vector<int> Peers::read_by() const {
  std::vector<int> ranks;
  for (const ShmLink* link : local_links_) {
    if (link != nullptr && link->is_read_by_peer()) ranks.push_back(link->peer());
  }
  return ranks;
}

void Peers::drop_links() {
  tcp_links_.clear();
  mpi_links_.clear();
  local_links_.clear();
  links_.clear();
}

}  // namespace multiring
