// Sends invalid input to every parser that reads from a socket. Meant to run under ASan.
//
//   handshakes_test [SCALE [SEED]]
//
// The input consists of valid messages of the protocol, some of them changed, truncated, repeated or moved. The test
// fails on a crash, a hang, a finding of a sanitizer, or a connection without the secret. SCALE 1 takes seconds.

#include "core/rank/context.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "checks.h"
#include "core/memory/abstract_socket.h"

using namespace multiring;
using namespace multiring::checks;

namespace {

uint64_t inputs = 0;

class Noise {
 public:
  explicit Noise(uint64_t seed) : engine_(seed) {}
  uint64_t below(uint64_t limit) { return std::uniform_int_distribution<uint64_t>(0, limit - 1)(engine_); }
  bool once_in(uint64_t turns) { return below(turns) == 0; }
  // Returns a value, often one at which parsers typically fail.
  uint64_t number() {
    static constexpr uint64_t kEdges[] = {0, 1, 2, 3, 63, 64, 127, 128, 255, 256, 65535, 65536, 1 << 17, (1 << 17) + 1,
                                          INT32_MAX, uint64_t{1} << 31, UINT32_MAX, uint64_t{1} << 32, INT64_MAX,
                                          uint64_t{1} << 63, UINT64_MAX - 1, UINT64_MAX};
    return once_in(3) ? engine_() : kEdges[below(std::size(kEdges))];
  }
  std::string bytes(size_t size) {
    std::string made(size, '\0');
    for (char& each : made) each = static_cast<char>(engine_());
    return made;
  }
  // Returns valid bytes with some changes: a flipped bit, another field, a cut, a repeated part or a missing part.
  std::string changed(std::string words) {
    for (uint64_t turns = 1 + below(3); turns > 0 && !words.empty(); --turns) {
      const size_t at = below(words.size());
      switch (below(6)) {
        case 0:
          words[at] = static_cast<char>(words[at] ^ (1 << below(8)));
          break;
        case 1: {
          const uint64_t value = number();
          std::memcpy(words.data() + at, &value, std::min<size_t>(words.size() - at, size_t{1} << below(4)));
          break;
        }
        case 2:
          words.resize(at);
          break;
        case 3:
          words.insert(at, words.substr(below(words.size()), below(64)));
          break;
        case 4:
          words.erase(at, below(32));
          break;
        default:
          words += bytes(below(100));
      }
    }
    return words;
  }

 private:
  std::mt19937_64 engine_;
};

struct Pair {
  Descriptor here;
  Descriptor there;
  Pair() {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) != 0) std::abort();
    here = Descriptor(ends[0]);
    there = Descriptor(ends[1]);
  }
};

void put(int fd, const std::string& words) {
  for (size_t at = 0; at < words.size();) {
    const ssize_t wrote = ::send(fd, words.data() + at, words.size() - at, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (wrote <= 0) return;
    at += static_cast<size_t>(wrote);
  }
}

std::string take(int fd) {
  std::string got(4096, '\0');
  const ssize_t size = ::recv(fd, got.data(), got.size(), MSG_DONTWAIT);
  got.resize(size > 0 ? static_cast<size_t>(size) : 0);
  return got;
}

const Handshake::Self kCaller{1, 4, "job", "secret", 2, 1};
const Handshake::Self kCalled{3, 4, "job", "secret", 2, 0};
Clock::time_point soon() { return Clock::now() + std::chrono::seconds(30); }

std::string hello() {
  std::string words = "MULTIRNG";
  for (const uint32_t field : {3U, 1U, 3U, 1U}) words.append(reinterpret_cast<const char*>(&field), sizeof field);
  return words + std::string(16, 'n');
}

// A process without the secret calls a rank, or is called by one.
void words_to_a_handshake(Noise& noise, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i, ++inputs) {
    Pair pair;
    const bool is_called = noise.once_in(2);
    Handshake handshake(std::move(pair.here), is_called ? kCalled : kCaller, is_called ? Handshake::kAnyone : 3,
                        soon());
    std::string words = is_called ? hello() + noise.bytes(32) + "W" : noise.bytes(48) + "W";
    if (!noise.once_in(4)) words = noise.changed(words);
    auto status = handshake.advance();
    for (size_t at = 0; at < words.size() && status == Handshake::Status::going;) {
      const size_t step = 1 + noise.below(words.size() - at);
      put(pair.there.get(), words.substr(at, step));
      at += step;
      status = handshake.advance();
    }
    pair.there.reset();
    for (int turn = 0; turn < 4 && status == Handshake::Status::going; ++turn) status = handshake.advance();
    check(status == Handshake::Status::refused, "a process without the secret is rejected");
  }
}

// A process between two ranks flips one bit of their messages, or none.
void words_on_the_way(Noise& noise, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i, ++inputs) {
    Pair first;
    Pair second;
    Handshake caller(std::move(first.here), kCaller, 3, soon());
    Handshake called(std::move(second.here), kCalled, Handshake::kAnyone, soon());
    constexpr size_t kAll = 40 + 48 + 32 + 1;
    const size_t target = noise.once_in(8) ? kAll : noise.below(kAll);
    size_t passed_on = 0;
    auto a = Handshake::Status::going;
    auto b = Handshake::Status::going;
    for (int turn = 0; turn < 6; ++turn) {
      if (a == Handshake::Status::going) a = caller.advance();
      if (b == Handshake::Status::going) b = called.advance();
      for (const auto& [from, to] :
           {std::pair{first.there.get(), second.there.get()}, {second.there.get(), first.there.get()}}) {
        std::string words = take(from);
        if (target >= passed_on && target < passed_on + words.size()) {
          words[target - passed_on] = static_cast<char>(words[target - passed_on] ^ (1 << noise.below(8)));
        }
        passed_on += words.size();
        put(to, words);
      }
    }
    check((a == Handshake::Status::done) == (target == kAll),
          "a handshake succeeds exactly if its messages were not changed");
    check(target == kAll || target == kAll - 1 || b != Handshake::Status::done,
          "no end accepts a changed proof");
  }
}

// The receiver of a link's events. It accepts the data of three operations until they are closed.
class Listener final : public LinkEvents {
 public:
  void on_frame(int, const Frame&, std::span<const std::byte> payload) override {
    for (const std::byte each : payload) sum_ += static_cast<uint64_t>(each);  // reads every byte
  }
  bool expects(const OperationKey& key) const override {
    return key.group == 1 && key.sequence < 3 && !ended.contains(key);
  }
  void on_loss(int, LossKind, const std::string&) override { lost = true; }
  void on_stuck(const OperationKey&, const std::string&) override {}
  bool lost = false;
  std::set<OperationKey> ended;

 private:
  uint64_t sum_ = 0;
};

std::string packet_of(Noise& noise, std::vector<uint64_t>& arrived, uint64_t& number) {
  static constexpr FrameKind kKinds[] = {
      FrameKind::round,   FrameKind::data,   FrameKind::data,  FrameKind::data,    FrameKind::taken,
      FrameKind::fail,    FrameKind::lost,   FrameKind::where, FrameKind::there,   FrameKind::mpi_message,
      FrameKind::granted, FrameKind::landed, FrameKind::rail,  FrameKind::control, FrameKind::control_taken};
  Packet packet;
  Frame& frame = packet.frame;
  frame.kind = kKinds[noise.below(std::size(kKinds))];
  frame.group = 1;
  frame.sequence = noise.below(4);
  frame.channel = static_cast<uint16_t>(noise.below(3));
  frame.slot = static_cast<uint32_t>(noise.below(7));
  frame.round = static_cast<uint8_t>(noise.below(3) + noise.below(4) * 0x40);
  frame.offset = noise.below(4);
  const bool has_payload = frame.kind == FrameKind::data ||
                           ((frame.kind == FrameKind::round || frame.kind == FrameKind::control) && noise.once_in(2));
  if (has_payload) frame.length = 1 + noise.below(noise.once_in(20) ? 60'000 : 300);
  uint64_t& stream = arrived[frame.sequence * 3 + frame.channel];
  if (frame.kind == FrameKind::data) {
    frame.offset = stream;
    stream += frame.length;
  } else {
    packet.number = ++number;
    std::memcpy(frame.note.data(), noise.bytes(frame.note.size()).data(), frame.note.size());
  }
  if (noise.once_in(40)) {  // an invalid field
    auto* words = reinterpret_cast<char*>(&packet);
    const uint64_t value = noise.number();
    const size_t size = size_t{1} << noise.below(4);
    std::memcpy(words + noise.below(sizeof packet / size) * size, &value, size);
  }
  std::string words(reinterpret_cast<const char*>(&packet), sizeof packet);
  return words + noise.bytes(std::min<uint64_t>(payload_of(frame), 1 << 18));
}

// An authenticated peer sends frames, some of them invalid, to a link whose streams are read at the same time.
void frames_to_a_link(Noise& noise, uint64_t count) {
  std::array<Poller::Ready, 16> ready;
  uint64_t links = 0;
  uint64_t taken = 0;
  const auto pool = std::make_shared<PayloadPool>();
  for (uint64_t sent = 0; sent < count; ++links) {
    std::map<StreamKey, std::pair<std::vector<std::byte>, size_t>> targets;  // memory, and number of filled bytes
    Poller poller;
    Listener listener;
    const auto rails = static_cast<uint16_t>(1 + noise.below(2));
    TcpLink link(1, listener, poller, {rails, std::chrono::seconds(2), std::chrono::seconds(60), pool});
    std::vector<Pair> pairs(rails);
    for (uint16_t rail = 0; rail < rails; ++rail) link.adopt(rail, std::move(pairs[rail].here));
    std::vector<uint64_t> arrived(12);
    uint64_t number = 0;
    const std::vector<std::byte> offered(3000);
    for (int channel = 0; channel < 2; ++channel)
      link.offer({{1, 0}, static_cast<uint16_t>(channel)}, offered.data(), offered.size());
    for (uint64_t turn = 0; turn < 200 && !listener.lost; ++turn, ++sent, ++inputs) {
      std::string words = packet_of(noise, arrived, number);
      if (noise.once_in(100)) words = noise.changed(words);
      put(pairs[noise.once_in(8) ? rails - 1 : 0].there.get(), words);
      const int events = poller.wait(ready.data(), static_cast<int>(ready.size()), 0);
      for (int i = 0; i < events; ++i) poller.dispatch(ready[static_cast<size_t>(i)]);
      if (listener.lost) break;
      const StreamKey key{{1, noise.below(3)}, static_cast<uint16_t>(noise.below(3))};
      auto& [target, filled] = targets.try_emplace(key, 20'000, 0).first->second;
      if (noise.once_in(50) || filled == target.size()) {
        link.close(key.operation);
        listener.ended.insert(key.operation);
        std::erase_if(targets, [&](const auto& each) { return each.first.operation == key.operation; });
      } else if (!listener.ended.contains(key.operation)) {
        InStream& stream = link.in(key);
        const size_t got = link.copy(stream, target.data() + filled, 1 + noise.below(target.size() - filled));
        if (got > 0) link.consume(key, stream, got);
        filled += got;
        taken += got;
      }
      link.pump();
      for (const Pair& pair : pairs) take(pair.there.get());
    }
    for (uint64_t sequence = 0; sequence < 3; ++sequence) link.close({1, sequence});
  }
  check(count / links > 10 && taken / links > 500, "links read most frames instead of rejecting them at once");
}

Descriptor connected_to(uint16_t port) {
  Descriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  if (::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) socket.reset();
  return socket;
}

std::unique_ptr<Context> rank_of_two(int rank) {
  return std::make_unique<Context>(ContextConfig{.rank = rank,
                                                 .size = 2,
                                                 .job = "job",
                                                 .secret = "secret",
                                                 .segment_bytes = size_t{1} << 24,
                                                 .stall_warn_s = 1,
                                                 .stall_timeout_s = 60});
}

bool joins(Context& context, int rank, uint16_t port_of_other, double timeout_s) {
  const PeerAddress peer{
      .rank = 1 - rank, .same_host = false, .handover = "", .rails = {{"127.0.0.1", port_of_other}}, .host = ""};
  return context.connect({peer}, {rank}, {1 - rank}, timeout_s, [] { return false; });
}

std::shared_ptr<const std::vector<Round>> one_round(int with) {
  return std::make_shared<std::vector<Round>>(std::vector<Round>{{with, with}});
}

// An authenticated peer sends such frames to a whole rank with operations in flight. The operations must end.
void frames_to_a_rank(Noise& noise, uint64_t count) {
  for (uint64_t sent = 0; sent < count;) {
    const auto context = rank_of_two(1);
    const uint16_t port = context->listen("127.0.0.1", 0, 0);
    Descriptor peer;
    std::thread caller([&] {
      Handshake handshake(connected_to(port), {0, 2, "job", "secret", 1, 0}, 1, soon());
      auto status = handshake.advance();
      while (status == Handshake::Status::going) {
        std::this_thread::sleep_for(std::chrono::microseconds(200));
        status = handshake.advance();
      }
      check(status == Handshake::Status::done, "a rank with the secret is accepted");
      peer = handshake.release();
    });
    check(joins(*context, 1, 1, 30), "a rank connects");
    caller.join();
    std::vector<std::shared_ptr<Operation>> operations;
    std::vector<std::vector<std::byte>> memory(3, std::vector<std::byte>(4000));
    for (uint64_t sequence = 0; sequence < 3; ++sequence) {
      auto program = std::make_shared<Program>();
      program->moves.push_back({.kind = MoveKind::send, .source_space = 1, .size = 2000, .peers = {0}});
      program->moves.push_back({.kind = MoveKind::copy,
                                .source_space = 1,
                                .target_space = 1,
                                .target_offset = 2000,
                                .size = 2000,
                                .peers = {0}});
      program->lowering = sequence == 1 ? Lowering::notes : Lowering::none;
      OperationSpec spec;
      spec.key = {1, sequence};
      spec.members = {0, 1};
      spec.rounds = one_round(0);
      spec.at_once = sequence == 2;
      spec.description = "what this rank means";
      spec.program = program;
      spec.bases = {nullptr, memory[sequence].data()};
      spec.user_bytes = 4000;
      operations.push_back(context->post(std::move(spec), false));
    }
    std::vector<uint64_t> arrived(12);
    uint64_t number = 0;
    for (uint64_t turn = 0; turn < 300; ++turn, ++sent, ++inputs) {
      std::string words = packet_of(noise, arrived, number);
      // Sometimes send a round with an equal digest, so that operations start to run.
      if (noise.once_in(10)) std::memset(words.data() + offsetof(Frame, note), 0, 24);
      if (noise.once_in(100)) words = noise.changed(words);
      if (::send(peer.get(), words.data(), words.size(), MSG_NOSIGNAL) < 0) break;
      if (noise.once_in(4)) take(peer.get());
      if (noise.once_in(20)) context->take_control_messages(0);
    }
    peer.reset();
    for (const auto& operation : operations) {
      check(context->wait(operation, 20) == Context::Waited::ended, "every operation ends");
    }
    context->close(0, false);
  }
}

// ---- ranks that were turned away call again -----------------------------------------------------

// A rank whose connection is waiting to be read must not be lost because of callers that arrived after it.
void callers_behind_a_rank() {
  const auto low = rank_of_two(0);
  const auto high = rank_of_two(1);
  const uint16_t low_port = low->listen("127.0.0.1", 0, 0);
  const uint16_t high_port = high->listen("127.0.0.1", 0, 0);
  bool low_joined = false;
  std::thread thread([&] {
    try {
      low_joined = joins(*low, 0, high_port, 30);
    } catch (const Fault& fault) {
      std::printf("%s\n", fault.what());
    }
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // the connection waits to be accepted
  std::vector<Descriptor> callers;
  for (int i = 0; i < 300; ++i) callers.push_back(connected_to(high_port));
  const bool high_joined = joins(*high, 1, low_port, 30);
  thread.join();
  check(low_joined && high_joined, "a rank is not turned away because of unknown callers");
  for (const Descriptor& caller : callers) check(caller.valid(), "unknown callers wait in the queue");
  low->close(0, true);
  high->close(0, true);
}

void turned_away_and_back() {
  const auto low = rank_of_two(0);
  const uint16_t low_port = low->listen("127.0.0.1", 0, 0);
  check(low_port != 0, "a rank listens");
  Descriptor door(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  if (::bind(door.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 || ::listen(door.get(), 8) != 0)
    std::abort();
  ::getsockname(door.get(), reinterpret_cast<sockaddr*>(&address), &length);
  Descriptor kept;
  std::thread high([&] {
    for (int turn = 0; turn < 3; ++turn) {  // close before any message, after the hello, after the answer
      Descriptor caller(::accept4(door.get(), nullptr, nullptr, SOCK_CLOEXEC));
      char words[40];
      if (turn > 0) [[maybe_unused]] const auto got = ::recv(caller.get(), words, sizeof words, MSG_WAITALL);
      if (turn < 2) continue;
      Handshake handshake(std::move(caller), {1, 2, "job", "secret", 1, 0}, Handshake::kAnyone, soon());
    }
    Descriptor caller(::accept4(door.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    Handshake handshake(std::move(caller), {1, 2, "job", "secret", 1, 0}, Handshake::kAnyone, soon());
    auto status = handshake.advance();
    while (status == Handshake::Status::going) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      status = handshake.advance();
    }
    check(status == Handshake::Status::done, "a rank that was turned away calls again");
    kept = handshake.release();
  });
  bool joined = false;
  try {
    joined = joins(*low, 0, ntohs(address.sin_port), 20);
  } catch (const Fault& fault) {
    std::printf("%s\n", fault.what());
    std::exit(1);  // the other thread would wait for ever
  }
  high.join();
  check(joined, "a rank that was turned away connects in the end");
  low->close(0, false);
}

// ---- doorbells --------------------------------------------------------------------------------------

void unknown_callers_at_the_doorbell(Noise& noise) {
  Doorbell::Word word{};
  for (uint8_t& each : word) each = static_cast<uint8_t>(noise.below(256));
  const std::string name = "multiring-test-" + std::to_string(::getpid());
  const Doorbell doorbell(name, word);
  const AbstractAddress address(name);
  const Descriptor caller(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  const std::string right(reinterpret_cast<const char*>(word.data()), word.size());
  for (int turn = 0; turn < 1000; ++turn, ++inputs) {
    std::string said = turn % 2 == 0 ? noise.bytes(noise.below(40)) : right;
    if (turn % 2 == 1) said[noise.below(said.size())] ^= 1;
    [[maybe_unused]] const auto sent =
        ::sendto(caller.get(), said.data(), said.size(), MSG_DONTWAIT, address.get(), address.length);
  }
  check(doorbell.silence() == 0, "datagrams without the word do not ring");
  doorbell.ring(name, word);
  check(doorbell.silence() == 1, "a datagram with the word rings, and finds room in the queue");
  for (int turn = 0; turn < 3; ++turn) doorbell.ring(name, word);
  check(doorbell.silence() == 3 && doorbell.silence() == 0, "each ring counts once");
}

void no_listener_without_a_secret() {
  Context context({.rank = 0, .size = 2, .job = "job", .secret = "", .segment_bytes = size_t{1} << 24});
  bool refused = false;
  try {
    context.listen("127.0.0.1", 0, 0);
  } catch (const Fault& fault) {
    refused = std::string(fault.what()).find("without a secret") != std::string::npos;
  }
  check(refused, "a rank without a secret cannot listen");
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t scale = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;
  Noise noise(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1);
  no_listener_without_a_secret();
  unknown_callers_at_the_doorbell(noise);
  callers_behind_a_rank();
  turned_away_and_back();
  words_to_a_handshake(noise, 1000 * scale);
  words_on_the_way(noise, 1000 * scale);
  frames_to_a_link(noise, 20'000 * scale);
  frames_to_a_rank(noise, 3000 * scale);
  std::printf("%llu inputs\n", static_cast<unsigned long long>(inputs));
  return result();
}
