// Bindings of programs (compiled schedules) and of the operations that run them.

#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <tuple>

#include "bind.h"
#include "core/operation/operation.h"

namespace nb = nanobind;

namespace multiring {
namespace {

template <typename T>
using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// The moves of one segment, as columns. The peers of move i are peers[peer_start[i]] to peers[peer_start[i + 1] - 1].
struct MoveColumns {
  Column<uint8_t> kind;
  Column<uint8_t> last;
  Column<uint16_t> channel;
  Column<uint8_t> source_space;
  Column<int64_t> source_offset;
  Column<uint8_t> target_space;
  Column<int64_t> target_offset;
  Column<int64_t> size;
  Column<int32_t> peer_start;
  Column<int32_t> peers;
  Column<uint8_t> wire;
  Column<uint8_t> keeps_coded;
  Column<int64_t> coded_offset;
};

struct ProgramForm {
  uint64_t scratch_bytes;
  DType dtype;
  ReduceOp op;
  uint64_t divisor;
  Lowering lowering;
  uint32_t segments;
  uint64_t segment_bytes;
  std::shared_ptr<Program> last_segment;
};

Move move_in(const MoveColumns& columns, size_t i) {
  Move move;
  move.kind = static_cast<MoveKind>(columns.kind(i));
  move.last = columns.last(i) != 0;
  move.channel = columns.channel(i);
  move.source_space = columns.source_space(i);
  move.source_offset = static_cast<uint64_t>(columns.source_offset(i));
  move.target_space = columns.target_space(i);
  move.target_offset = static_cast<uint64_t>(columns.target_offset(i));
  move.size = static_cast<uint64_t>(columns.size(i));
  move.wire = static_cast<Wire>(columns.wire(i));
  move.keeps_coded = columns.keeps_coded(i) != 0;
  move.coded_offset = static_cast<uint64_t>(columns.coded_offset(i));
  for (int32_t p = columns.peer_start(i); p < columns.peer_start(i + 1); ++p) {
    move.peers.push_back(columns.peers(static_cast<size_t>(p)));
  }
  return move;
}

std::shared_ptr<Program> make_program(const MoveColumns& columns, const ProgramForm& form) {
  auto program = std::make_shared<Program>();
  program->scratch_bytes = form.scratch_bytes;
  program->dtype = form.dtype;
  program->op = form.op;
  program->divisor = form.divisor;
  program->lowering = form.lowering;
  program->segments = form.segments;
  program->segment_bytes = form.segment_bytes;
  program->last = form.last_segment;
  for (size_t i = 0; i < columns.kind.shape(0); ++i) program->moves.push_back(move_in(columns, i));
  program->complete();
  return program;
}

}  // namespace

void bind_operations(nb::module_& m) {
  nb::enum_<Lowering>(m, "Lowering")
      .value("NONE", Lowering::none)
      .value("SLICE", Lowering::slice)
      .value("STAGED_SLICE", Lowering::staged_slice)
      .value("EXCHANGE", Lowering::exchange)
      .value("NOTES", Lowering::notes);
  m.attr("NOTE_BYTES") = kNoteBytes;
  m.attr("MOST_LANES") = kMostLanes;
  nb::class_<Program>(m, "Program").def_prop_ro("scratch_bytes", [](const Program& p) { return p.scratch_bytes; });
  nb::class_<MoveColumns>(m, "MoveColumns")
      .def(nb::init<Column<uint8_t>, Column<uint8_t>, Column<uint16_t>, Column<uint8_t>, Column<int64_t>,
                    Column<uint8_t>, Column<int64_t>, Column<int64_t>, Column<int32_t>, Column<int32_t>,
                    Column<uint8_t>, Column<uint8_t>, Column<int64_t>>(),
           nb::kw_only(), nb::arg("kind"), nb::arg("last"), nb::arg("channel"), nb::arg("source_space"),
           nb::arg("source_offset"), nb::arg("target_space"), nb::arg("target_offset"), nb::arg("size"),
           nb::arg("peer_start"), nb::arg("peers"), nb::arg("wire"), nb::arg("keeps_coded"), nb::arg("coded_offset"),
           "The moves of one rank in one segment: offsets and sizes in bytes, peers as world ranks.");
  nb::class_<ProgramForm>(m, "ProgramForm")
      .def(nb::init<uint64_t, DType, ReduceOp, uint64_t, Lowering, uint32_t, uint64_t, std::shared_ptr<Program>>(),
           nb::kw_only(), nb::arg("scratch_bytes"), nb::arg("dtype"), nb::arg("op"), nb::arg("divisor"),
           nb::arg("lowering"), nb::arg("segments"), nb::arg("segment_bytes"), nb::arg("last_segment").none(),
           "The parameters of a program: scratch memory, reduction, lowering and segments.");
  m.def("make_program", &make_program, nb::arg("columns"), nb::arg("form"));
  nb::class_<Rounds>(m, "Rounds").def(
      "__init__",
      [](Rounds* self, const std::vector<std::pair<int, int>>& pairs) {
        auto list = std::make_shared<std::vector<Round>>();
        for (const auto& [to, from] : pairs) list->push_back({to, from});
        new (self) Rounds{std::move(list)};
      },
      nb::arg("pairs"), "Rounds of agreement as (to, from) pairs of world ranks.");
  nb::class_<OperationSpec>(m, "OperationSpec")
      .def(
          "__init__",
          [](OperationSpec* self, std::pair<uint64_t, uint64_t> key, std::vector<int> members, const Rounds& rounds,
             bool at_once, const nb::bytes& digest, std::string description, std::shared_ptr<Program> program,
             uintptr_t input, uintptr_t output, uint64_t user_bytes, uint32_t name, std::shared_ptr<SharedSlots> slots,
             bool meets, bool tells_mismatch) {
            if (digest.size() != 16) throw Fault(FaultKind::argument, "a digest has 16 bytes");
            new (self) OperationSpec();
            self->key = {key.first, key.second};
            self->members = std::move(members);
            self->rounds = rounds.list;
            self->at_once = at_once;
            std::copy_n(reinterpret_cast<const uint8_t*>(digest.c_str()), 16, self->digest.begin());
            self->description = std::move(description);
            self->program = std::move(program);
            self->bases = {reinterpret_cast<std::byte*>(input), reinterpret_cast<std::byte*>(output)};
            self->user_bytes = user_bytes;
            self->name = name;
            self->slots = std::move(slots);
            self->meets = meets;
            self->tells_mismatch = tells_mismatch;
          },
          nb::arg("key"), nb::arg("members"), nb::arg("rounds"), nb::arg("at_once"), nb::arg("digest"),
          nb::arg("description"), nb::arg("program").none(), nb::arg("input"), nb::arg("output"), nb::arg("user_bytes"),
          nb::arg("name"), nb::arg("slots").none(), nb::arg("meets"), nb::arg("tells_mismatch"));
  // Python may read an Operation only after its end, because another thread changes it until then.
  nb::class_<Operation>(m, "Operation")
      .def_prop_ro("title", [](const Operation& operation) { return operation.spec().description; })
      .def_prop_ro("sequence", [](const Operation& operation) { return operation.spec().key.sequence; })
      .def_prop_ro(
          "ran_s",
          [](const Operation& operation) {
            const auto seconds = [](Clock::time_point at) {
              return std::chrono::duration<double>(at.time_since_epoch()).count();
            };
            return std::pair(seconds(operation.agreed()), seconds(operation.finished));
          },
          "The times when all ranks had arrived (0 if they never did) and when the operation ended, in seconds of the "
          "monotonic clock.")
      .def_prop_ro("fault", &Operation::fault)
      .def_prop_ro("fault_text", &Operation::fault_text)
      .def_prop_ro(
          "culprit", [](const Operation& operation) { return operation.culprit; },
          "The rank that was silent in a stall; else -1.")
      .def_prop_ro("descriptions", &Operation::descriptions)
      .def_prop_ro("log", [](const Operation& operation) {
        std::vector<std::tuple<Lowering, uint32_t, uint32_t, uint64_t>> entries;
        for (const auto& entry : operation.log())
          entries.emplace_back(entry.lowering, entry.segment, entry.index, entry.bytes);
        return entries;
      });
}

}  // namespace multiring
