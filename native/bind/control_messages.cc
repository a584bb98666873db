// Notices, and a Context's ways to send and take them.

#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind.h"

namespace nb = nanobind;

namespace multiring {

void bind_notices(nb::module_& m) {
  nb::enum_<Notice::Kind>(m, "NoticeKind")
      .value("MESSAGE", Notice::Kind::message)
      .value("MISMATCH", Notice::Kind::mismatch)
      .value("LOSS", Notice::Kind::loss);
  nb::class_<Notice>(m, "Notice")
      .def_ro("kind", &Notice::kind)
      .def_ro("rank", &Notice::rank, "In the world: who sent a message; who is gone.")
      .def_ro("group", &Notice::group, "What a message is for; the group of a mismatch.")
      .def_ro("tag", &Notice::tag, "Of a message; a mismatch's sequence number.")
      .def_prop_ro("payload", [](const Notice& notice) { return nb::bytes(notice.payload.data(), notice.payload.size()); },
                   "What a message says; why a rank is gone.")
      .def_prop_ro("died", [](const Notice& notice) { return is_death(static_cast<LossKind>(notice.tag)); },
                   "Of a loss: whether the rank died, rather than left.")
      .def_ro("titles", &Notice::titles, "What each rank of the world called the operation of a mismatch.");
}

void bind_context_notices(nb::class_<Context>& context) {
  context
      .def("link_with", &Context::link_with, nb::arg("ranks"), nb::call_guard<WithoutGil>(),
           "Open the connections with these ranks that are not there yet; the others do the same.")
      .def("notify",
           [](Context& self, int rank, uint64_t group, uint64_t tag, const nb::bytes& payload) {
             const std::span bytes(reinterpret_cast<const std::byte*>(payload.c_str()), payload.size());
             const WithoutGil release;
             return self.notify(rank, group, tag, bytes);
           },
           nb::arg("rank"), nb::arg("group"), nb::arg("tag"), nb::arg("payload"),
           "Send a short message to a rank of the world, outside any operation. False: it is gone, or cannot be reached.")
      .def("take_notices", &Context::take_notices, nb::arg("timeout_s"), nb::call_guard<WithoutGil>(),
           "What has come since the last call, at once where there is something; None once the context is closed.")
      .def("prod", &Context::prod, nb::call_guard<WithoutGil>(), "Have take_notices return.");
}

}  // namespace multiring
