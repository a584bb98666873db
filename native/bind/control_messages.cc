// Bindings of control messages, and of the functions of a Context that send and take them.

#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind.h"

namespace nb = nanobind;

namespace multiring {

void bind_control_messages(nb::module_& m) {
  nb::enum_<ControlMessageKind>(m, "ControlMessageKind")
      .value("MESSAGE", ControlMessageKind::message)
      .value("MISMATCH", ControlMessageKind::mismatch)
      .value("LOSS", ControlMessageKind::loss);
  nb::class_<ControlMessage>(m, "ControlMessage")
      .def_ro("kind", &ControlMessage::kind)
      .def_ro("rank", &ControlMessage::rank, "The sender of a message, or the lost rank; a world rank.")
      .def_ro("group", &ControlMessage::group, "The address of a message, or the group of a mismatch.")
      .def_ro("tag", &ControlMessage::tag, "The tag of a message, or the sequence number of a mismatch.")
      .def_prop_ro(
          "payload",
          [](const ControlMessage& message) { return nb::bytes(message.payload.data(), message.payload.size()); },
          "The content of a message, or the reason of a loss.")
      .def_prop_ro(
          "died", [](const ControlMessage& message) { return is_death(static_cast<LossKind>(message.tag)); },
          "Whether the lost rank died rather than left.")
      .def_prop_ro(
          "is_cut_off",
          [](const ControlMessage& message) { return static_cast<LossKind>(message.tag) == LossKind::cut_off; },
          "Whether the lost rank's host cannot be reached, so that the rank may still run.")
      .def_ro("titles", &ControlMessage::titles, "The description of a mismatched operation on each world rank.");
}

void bind_context_control(nb::class_<Context>& context) {
  context
      .def("link_with", &Context::link_with, nb::arg("ranks"), nb::call_guard<WithoutGil>(),
           "Open the missing connections with these ranks. Those ranks must make the same call.")
      .def(
          "notify",
          [](Context& self, int rank, uint64_t group, uint64_t tag, const nb::bytes& payload) {
            const std::span bytes(reinterpret_cast<const std::byte*>(payload.c_str()), payload.size());
            const WithoutGil release;
            return self.notify(rank, group, tag, bytes);
          },
          nb::arg("rank"), nb::arg("group"), nb::arg("tag"), nb::arg("payload"),
          "Send a short message to a world rank, outside any operation. Return False if the rank is lost or cannot be "
          "reached.")
      .def("take_control_messages", &Context::take_control_messages, nb::arg("timeout_s"), nb::call_guard<WithoutGil>(),
           "Return the messages since the last call; wait for one up to `timeout_s`. Return None once the context is "
           "closed.")
      .def("wake_control", &Context::wake_control, nb::call_guard<WithoutGil>(),
           "Make `take_control_messages` return.");
}

}  // namespace multiring
