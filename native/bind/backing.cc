// Pages of the arena behind memory of somebody else's.

#include "core/backing.h"

#include "bind.h"

namespace nb = nanobind;

namespace multiring {
namespace {

std::byte* pointer(uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

}  // namespace

void bind_backing(nb::module_& m) {
  nb::class_<Backing>(m, "Backing")
      .def(
          "__init__",
          [](Backing* self, Context& context, uintptr_t address, size_t bytes) {
            new (self) Backing(context.own_segment(), pointer(address), bytes);
          },
          nb::arg("context"), nb::arg("address"), nb::arg("bytes"), nb::call_guard<nb::gil_scoped_release>(),
          "Pages of the arena behind private memory that keeps its address; whoever has it keeps it allocated.")
      .def_prop_ro("place", [](const Backing& self) { return reinterpret_cast<uintptr_t>(self.place()); },
                   "Where the same bytes lie in the arena.")
      .def("stands", &Backing::stands, "Whether the memory still is the arena's. It is nobody else's to write now.")
      .def("fill", &Backing::fill, "Copy what is not on whole pages into the arena.")
      .def("empty", &Backing::empty, "Copy what is not on whole pages back.")
      .def("lift", &Backing::lift, nb::arg("keep"), nb::call_guard<nb::gil_scoped_release>(),
           "Give the memory pages of its own again, which hold what they held if `keep`. The last call.")
      .def("part", &Backing::part, "In a forked child: let neither process see what the other writes from now on.");
}

}  // namespace multiring
