// One collective (or one message) in flight on this rank: agree, run the compiled moves, drain.
//
// An Operation never blocks: `drive` does what can be done now. It first agrees on the descriptor
// with every rank of the operation, in the rounds the group's grid gives, so that no input is
// overwritten before all ranks are known to mean the same thing. Where they do not, a second
// exchange gathers every rank's description and the operation ends as a mismatch, inputs intact.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "codec_stream.h"
#include "combine.h"
#include "shared_slots.h"
#include "fault.h"
#include "link.h"
#include "segment.h"

namespace multiring {

using Clock = std::chrono::steady_clock;

// Enough that every link has work while segments wait for each other's last bytes; each lane costs a stream a peer.
inline constexpr uint32_t kMostLanes = 16;
inline constexpr uint8_t kMostEager = 64;  // messages from one rank to another on a channel, where they travel as notes

enum class MoveKind : uint8_t { send = 0, copy = 1, reduce = 2 };

// One move of a Schedule, with extents resolved to bytes. Ranks are world ranks.
struct Move {
  MoveKind kind{};
  bool last = false;  // reduce: every contribution is in, so an average divides here
  uint16_t channel = 0;
  uint8_t source_space = 0;  // 0 input, 1 output, 2 scratch
  uint8_t target_space = 0;
  uint64_t source_offset = 0;  // bytes
  uint64_t target_offset = 0;
  uint64_t size = 0;  // bytes, before they are coded
  std::vector<int> peers;
  Wire wire = Wire::none;     // how what it sends or takes is coded; then the type is f32
  bool keeps_coded = false;   // send: leaves at the source what its peers decode
  uint64_t coded_offset = 0;  // send: where in scratch its encoding goes
};

uint64_t wire_bytes(const Move& move, uint64_t size);  // what `size` bytes of a move are while they travel

// After a failure: a process that is stopped does not answer.
inline constexpr auto kQuietPatience = std::chrono::seconds(5);

// How a program may run other than move by move; each has a differential test against that.
enum class Lowering : uint8_t {
  none,
  // A direct all_reduce whose buffers all lie in arenas: each rank combines its slice of all buffers and writes the
  // result into all of them. One pass over the memory, where the moves make two.
  slice,
  // The same on a rank whose buffer is ordinary memory, and small: the others work on a copy in its segment.
  staged_slice,
  // An all_reduce by exchange of buffers that fit the group's slots: publish, combine everybody's. One step, and no
  // agreement before it: the slots hold the descriptors too.
  exchange,
  // The same where ranks are on several hosts: what a move sends travels with the agreement's note, copied, so that no
  // agreement comes before. Only moves that make a part complete write the user's buffer, once every rank is known to
  // mean the same.
  notes,
};

// What the executor did, move by move; `index` is the move's place in the program of its segment.
struct LogEntry {
  Lowering lowering;  // of the whole program; then, but for notes, `index` is the move that says which extents
  uint32_t segment;
  uint32_t index;
  uint64_t bytes;  // bytes that really went through it, summed over peers
};

// A Schedule compiled for one rank, one size and one type; immutable, shared by operations.
//
// With several segments the moves are those of one: the buffer is that many pieces, `segment_bytes` apart, and each
// goes through the whole schedule by itself. `last` are the moves of the last piece where it is of another size.
struct Program {
  std::vector<Move> moves;
  uint32_t segments = 1;
  uint64_t segment_bytes = 0;
  std::shared_ptr<const Program> last;
  uint16_t channels = 1;
  uint64_t scratch_bytes = 0;  // of one segment
  DType dtype = DType::u8;
  ReduceOp op = ReduceOp::sum;
  uint64_t divisor = 1;
  Lowering lowering = Lowering::none;

  uint32_t lanes() const;  // how many segments run side by side
  // Throws Fault::argument unless the lowering does what the moves do: that those are proven is then proof of both.
  void check_lowering() const;
};

// One round of agreement: a note goes to `to` and one comes from `from` (world ranks).
struct Round {
  int to;
  int from;
};

struct OperationSpec {
  OperationKey key;
  std::vector<int> members;                          // world ranks
  std::shared_ptr<const std::vector<Round>> rounds;  // empty for one rank
  std::shared_ptr<SharedSlots> slots;  // the group's, where all of it is on one host; null: none
  bool meets = false;  // may meet there: a blocking call, a lowering that can, a payload that fits
  bool tells_mismatch = false;  // a mismatch becomes a control message, so that it is heard of though nobody waits
  bool at_once = false;  // every rank tells every other directly, all rounds at the same time
  Digest digest{};
  std::string description;  // shown to other ranks in a mismatch
  std::shared_ptr<const Program> program;  // null: agree only (barrier, or a rank whose arguments are wrong)
  std::array<std::byte*, 2> bases{};       // input, output
  uint64_t user_bytes = 0;                 // for events
  uint32_t name = 0;                       // for events
};

// The rank an operation lives on.
class Host {
 public:
  virtual ~Host() = default;
  virtual Link& link(int peer) = 0;  // connects when first asked
  virtual Segment& segment() = 0;
  virtual int rank() const = 0;
  virtual bool logs_moves() const = 0;
  virtual uint64_t& staged_bytes() = 0;  // of all operations in flight
  virtual bool lowers() const = 0;  // false: move by move, for tests
  virtual bool times_work() const = 0;  // whether operations keep their reductions
  virtual bool shares_memory(int peer) const = 0;  // whether a rank of this host, alive as far as is known
};

// Combines what all ranks have published for `sequence` into `target`.
void combine_published(const Program& program, const SharedSlots& slots, uint64_t sequence, std::byte* target, size_t bytes);

class Operation {
 public:
  // quieting: it has failed, but peers may still write into its user's memory.
  enum class State : uint8_t { in_slots, eager, agreeing, explaining, running, slicing, completing, draining, quieting, done, failed };

  Operation(OperationSpec spec, Host& host);
  ~Operation();
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  // Instead of agreeing first: meets the others in the slots. `is_published`: this rank's is written already.
  void begin_in_slots(bool is_published);
  bool drive();  // true if anything moved
  void on_round(int peer, const Frame& frame, std::span<const std::byte> payload);
  // Over at once, or quieting until every peer that may write into its memory has said that it does not any more, or
  // kQuietPatience is over.
  void fail(FaultKind kind, const std::string& text);
  bool has_failed() const { return state_ == State::quieting || state_ == State::failed; }
  bool is_written_by_peers() const;  // whether `fail` would have to wait
  void on_failure(int peer);         // it has failed over there: nothing is read or written there any more
  void on_quiet(int peer) { loud_.erase(peer); }
  void end_quieting();  // the peers are not waited for any more

  bool ended() const { return state_ == State::done || state_ == State::failed; }
  State state() const { return state_; }
  const OperationSpec& spec() const { return spec_; }
  std::vector<int> waiting_for() const;  // ranks whose frame or bytes would let it go on
  bool involves(int rank) const;
  const std::vector<int>& partners() const { return partners_; }

  FaultKind fault() const { return fault_; }
  const std::string& fault_text() const { return fault_text_; }
  const std::map<int, std::string>& descriptions() const { return descriptions_; }  // after a mismatch
  const std::vector<LogEntry>& log() const { return log_; }
  // Stretches in which this rank combined, decoded, or wrote a result into others' buffers; short gaps are part of them.
  struct Stretch {
    Clock::time_point start;
    Clock::time_point end;
    Clock::duration busy;
  };
  const std::vector<Stretch>& reductions() const { return reductions_; }

  Clock::time_point posted = Clock::now();
  Clock::time_point moved = posted;  // last time anything moved
  Clock::time_point agreed{};
  Clock::time_point finished{};
  int culprit = -1;  // whom the ranks we wait for say they wait for

 private:
  // As long as it lives this rank reduces for the operation.
  class Reducing {
   public:
    explicit Reducing(Operation& operation) : operation_(operation), start_(operation.host_.times_work() ? Clock::now() : Clock::time_point{}) {}
    ~Reducing() {
      if (start_ != Clock::time_point{}) operation_.reduced(start_, Clock::now());
    }
    Reducing(const Reducing&) = delete;
    Reducing& operator=(const Reducing&) = delete;

   private:
    Operation& operation_;
    const Clock::time_point start_;
  };

  struct Note {
    Frame frame;
    std::vector<std::byte> payload;
  };
  // Segments one after the other that share a line of streams; lanes run side by side, and wait for nobody but
  // their own segment's messages.
  struct Lane {
    uint16_t slot;
    uint32_t segment;
    size_t next = 0;        // move
    uint64_t progress = 0;  // bytes of it
  };

  bool meet();
  void leave_slots(State state);
  void learn_slots();
  bool eager();
  void send_eager(const Lane& lane, const Move& move);
  bool take_eager(const Lane& lane, const Move& move);
  bool agree();
  bool explain();
  bool run();
  bool drain();
  bool quiet();
  bool reads_failed_memory(const std::vector<int>& peers);
  void let_go();
  Frame note_of(size_t round) const;
  bool choose_lowering();
  void stage();
  void unstage();
  void copy_but_slice(std::byte* to, const std::byte* from) const;
  bool slice();
  bool pass_barrier();
  void open_lanes();
  bool advance(Lane& lane, uint64_t& budget);
  bool step(Lane& lane, const Move& move);
  bool is_in_place(const Lane& lane, const Move& move) const;
  bool receive(Lane& lane, const Move& move);
  void send_coded(Lane& lane, const Move& move);
  bool receive_coded(Lane& lane, const Move& move);
  void combine_coded(const Lane& lane, const Move& move, std::byte* target, uint64_t elements);
  uint64_t logged_bytes(const Lane& lane, const Move& move) const;
  void finish(State state);
  void reduced(Clock::time_point start, Clock::time_point end);
  const std::vector<Move>& moves_of(const Lane& lane) const;
  StreamKey stream_of(const Lane& lane, uint16_t channel) const;
  std::vector<int> readers_of(const Lane& lane) const;  // peers that were offered bytes on its streams and have not taken them
  std::byte* address(const Lane& lane, uint8_t space, uint64_t offset) const;

  OperationSpec spec_;
  Host& host_;
  std::vector<int> partners_;  // ranks this one talks to directly
  State state_ = State::agreeing;
  FaultKind fault_ = FaultKind::none;
  std::string fault_text_;

  size_t round_ = 0;
  bool round_sent_ = false;
  bool conflict_ = false;
  // A line of messages, as moves have them: the n-th sent on it is the n-th taken.
  struct Line {
    int peer;
    uint16_t channel;
    auto operator<=>(const Line&) const = default;
  };
  std::map<uint8_t, Frame> notes_;  // rounds that arrived before their turn
  std::map<std::pair<Line, uint8_t>, Note> eager_came_;  // eager: messages that arrived, by their place on their line
  std::map<Line, uint8_t> eager_sent_;                   // messages sent
  std::map<Line, uint8_t> eager_taken_;                   // messages taken

  std::set<int> failed_peers_;  // where it has failed, as they told
  std::set<int> loud_;          // quieting: peers that have yet to say that they write no more
  Clock::time_point quiet_by_{};

  std::map<int, std::string> descriptions_;
  std::vector<std::string> told_;  // what each explain round sent; links read it until it is taken
  std::string heard_;

  std::vector<std::byte*> reached_;  // slice: everybody's buffer, in the order of summation
  std::vector<const Move*> slices_;  // slice: the reductions, which say what this rank's are
  size_t slice_ = 0;                 // slice: the one at work
  std::byte* staged_ = nullptr;      // slice: the copy of this rank's buffer that the others work on
  uint64_t progress_ = 0;            // slice: bytes of it
  std::vector<Lane> lanes_;          // oldest segment first
  std::byte* scratch_ = nullptr;
  std::map<uint16_t, std::vector<CodedStream>> coded_;  // of each lane, by the place among the move's peers
  std::vector<float> decoded_;                          // operands of a coded reduction, a little of each
  std::vector<LogEntry> log_;
  std::vector<Stretch> reductions_;
  Clock::duration joined_ = std::chrono::microseconds(20);  // gaps up to so long belong to a stretch
};

}  // namespace multiring
