// Control messages, and a Context's ways to send and take them.

#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind.h"

namespace nb = nanobind;

namespace multiring {

void bind_control_messages(nb::module_& m) {
  nb::enum_<ControlMessage::Kind>(m, "ControlMessageKind")
      .value("MESSAGE", ControlMessage::Kind::message)
      .value("MISMATCH", ControlMessage::Kind::mismatch)
      .value("LOSS", ControlMessage::Kind::loss);
  nb::class_<ControlMessage>(m, "ControlMessage")
      .def_ro("kind", &ControlMessage::kind)
      .def_ro("rank", &ControlMessage::rank, "In the world: who sent a message; who is gone.")
      .def_ro("group", &ControlMessage::group, "What a message is for; the group of a mismatch.")
      .def_ro("tag", &ControlMessage::tag, "Of a message; a mismatch's sequence number.")
      .def_prop_ro(
          "payload",
          [](const ControlMessage& message) { return nb::bytes(message.payload.data(), message.payload.size()); },
          "What a message says; why a rank is gone.")
      .def_prop_ro(
          "died", [](const ControlMessage& message) { return is_death(static_cast<LossKind>(message.tag)); },
          "Of a loss: whether the rank died, rather than left.")
      .def_ro("titles", &ControlMessage::titles, "What each rank of the world called the operation of a mismatch.");
}

void bind_context_control(nb::class_<Context>& context) {
  context
      .def("link_with", &Context::link_with, nb::arg("ranks"), nb::call_guard<WithoutGil>(),
           "Open the connections with these ranks that are not there yet; the others do the same.")
      .def(
          "notify",
          [](Context& self, int rank, uint64_t group, uint64_t tag, const nb::bytes& payload) {
            const std::span bytes(reinterpret_cast<const std::byte*>(payload.c_str()), payload.size());
            const WithoutGil release;
            return self.notify(rank, group, tag, bytes);
          },
          nb::arg("rank"), nb::arg("group"), nb::arg("tag"), nb::arg("payload"),
          "Send a short message to a rank of the world, outside any operation. False: it is gone, or cannot be "
          "reached.")
      .def("take_control_messages", &Context::take_control_messages, nb::arg("timeout_s"), nb::call_guard<WithoutGil>(),
           "What has come since the last call, at once where there is something; None once the context is closed.")
      .def("wake_control", &Context::wake_control, nb::call_guard<WithoutGil>(), "Have take_control_messages return.");
}

}  // namespace multiring
