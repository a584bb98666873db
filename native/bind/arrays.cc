// Bindings of views of other libraries' arrays (DLPack, buffer protocol), and of the kernels for tests.

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "bind.h"
#include "core/kernels/codec.h"
#include "core/kernels/combine.h"
#include "core/memory/digest.h"

namespace nb = nanobind;

namespace multiring {
namespace {

std::string name_of(nb::dlpack::dtype dtype) {
  std::string kind = "unknown" + std::to_string(dtype.code) + "_";
  switch (static_cast<nb::dlpack::dtype_code>(dtype.code)) {
    case nb::dlpack::dtype_code::Int: kind = "int"; break;
    case nb::dlpack::dtype_code::UInt: kind = "uint"; break;
    case nb::dlpack::dtype_code::Float: kind = "float"; break;
    case nb::dlpack::dtype_code::Bfloat: kind = "bfloat"; break;
    case nb::dlpack::dtype_code::Complex: kind = "complex"; break;
    case nb::dlpack::dtype_code::Bool: return "bool";
    default: break;
  }
  return kind + std::to_string(dtype.bits);
}

// A view of memory that another object owns. The view keeps the memory alive.
struct View {
  nb::ndarray<nb::ro> array;
  uintptr_t address() const { return reinterpret_cast<uintptr_t>(array.data()); }
  std::string dtype() const { return name_of(array.dtype()); }
  int device() const { return array.device_type(); }
  std::vector<int64_t> shape() const {
    std::vector<int64_t> out;
    for (size_t i = 0; i < array.ndim(); ++i) out.push_back(static_cast<int64_t>(array.shape(i)));
    return out;
  }
  std::vector<int64_t> strides() const {
    std::vector<int64_t> out;
    for (size_t i = 0; i < array.ndim(); ++i) out.push_back(array.stride(i));
    return out;
  }
};

void combine_arrays(DType dtype, ReduceOp op, uintptr_t target, const std::vector<uintptr_t>& sources, size_t count,
                    uint64_t divisor) {
  std::vector<const void*> pointers;
  for (const uintptr_t source : sources) pointers.push_back(reinterpret_cast<const void*>(source));
  const WithoutGil release;
  combine(dtype, op, reinterpret_cast<void*>(target), pointers.data(), static_cast<int>(pointers.size()), count,
          divisor);
}

void round_trip(Wire wire, uintptr_t target, uintptr_t source, size_t count) {
  const WithoutGil release;
  const size_t step = 16 * kScaledElements;
  std::array<std::byte, encoded_bytes(Wire::none, step)> coded;
  for (size_t done = 0; done < count; done += step) {
    const size_t some = std::min(step, count - done);
    encode(wire, coded.data(), reinterpret_cast<const float*>(source) + done, some);
    decode(wire, reinterpret_cast<float*>(target) + done, coded.data(), some);
  }
}

}  // namespace

void bind_arrays(nb::module_& m) {
  nb::class_<View>(m, "View")
      .def_prop_ro("address", &View::address)
      .def_prop_ro("dtype", &View::dtype)
      .def_prop_ro("device", &View::device, "The DLPack device type; 1 is host memory.")
      .def_prop_ro("shape", &View::shape)
      .def_prop_ro("strides", &View::strides, "The strides in elements.");
  m.def("view", [](nb::ndarray<nb::ro> array) { return View{std::move(array)}; });
  m.def("combine", &combine_arrays, nb::arg("dtype"), nb::arg("op"), nb::arg("target"), nb::arg("sources"),
        nb::arg("count"), nb::arg("divisor"),
        "Combine the sources from left to right into the target. All addresses are of host memory.");
  nb::enum_<Wire> wires(m, "Wire");
  for (const WireFormat& format : kWireFormats) wires.value(format.name, static_cast<Wire>(&format - kWireFormats));
  m.def("encoded_bytes", &encoded_bytes, nb::arg("wire"), nb::arg("elements"));
  m.def(
      "encode",
      [](Wire wire, uintptr_t target, uintptr_t source, size_t count) {
        encode(wire, reinterpret_cast<void*>(target), reinterpret_cast<const void*>(source), count);
      },
      nb::arg("wire"), nb::arg("target"), nb::arg("source"), nb::arg("count"),
      "Encode `count` float32 values for the wire; for tests.");
  m.def("round_trip", &round_trip, nb::arg("wire"), nb::arg("target"), nb::arg("source"), nb::arg("count"),
        "Encode and decode `count` float32 values. Both addresses are of host memory and may be equal.");
  m.def("combine_isa", &combine_isa);
  m.def("force_isa", &force_isa, nb::arg("name"));
  m.def("hmac_sha256", [](const nb::bytes& key, const nb::bytes& message) {
    const Sha256 mac = hmac_sha256({key.c_str(), key.size()}, {message.c_str(), message.size()});
    return nb::bytes(mac.data(), mac.size());
  });
}

}  // namespace multiring
