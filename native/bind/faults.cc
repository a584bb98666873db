// Translates the core's faults to exceptions of multiring.errors, and binds the core's enumerations.

#include <exception>

#include "bind.h"
#include "core/kernels/combine.h"
#include "core/memory/fault.h"

namespace nb = nanobind;

namespace multiring {
namespace {

const char* class_of(FaultKind kind) {
  switch (kind) {
    case FaultKind::argument: return "ArgumentError";
    case FaultKind::mismatch: return "MismatchError";
    case FaultKind::peer_lost: return "PeerLostError";
    case FaultKind::stall: return "StallError";
    case FaultKind::rendezvous: return "RendezvousError";
    default: return "StateError";
  }
}

}  // namespace

void bind_faults(nb::module_& m) {
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const Fault& fault) {
      const nb::object kind = nb::module_::import_("multiring.errors").attr(class_of(fault.kind()));
      PyErr_SetString(kind.ptr(), fault.what());
    }
  });
  nb::enum_<FaultKind>(m, "FaultKind")
      .value("NONE", FaultKind::none)
      .value("ARGUMENT", FaultKind::argument)
      .value("MISMATCH", FaultKind::mismatch)
      .value("PEER_LOST", FaultKind::peer_lost)
      .value("STALL", FaultKind::stall)
      .value("STATE", FaultKind::state)
      .value("RENDEZVOUS", FaultKind::rendezvous);
  nb::enum_<DType>(m, "DType")
      .value("int8", DType::i8)
      .value("int16", DType::i16)
      .value("int32", DType::i32)
      .value("int64", DType::i64)
      .value("uint8", DType::u8)
      .value("uint16", DType::u16)
      .value("uint32", DType::u32)
      .value("uint64", DType::u64)
      .value("float16", DType::f16)
      .value("bfloat16", DType::bf16)
      .value("float32", DType::f32)
      .value("float64", DType::f64)
      .value("bool", DType::boolean);
  nb::enum_<ReduceOp>(m, "ReduceOp")
      .value("sum", ReduceOp::sum)
      .value("min", ReduceOp::min)
      .value("max", ReduceOp::max)
      .value("product", ReduceOp::product);
}

}  // namespace multiring
