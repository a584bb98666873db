// Bindings of the requests of native code, for the Python threads that serve them.

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind.h"
#include "core/rank/request_queue.h"

namespace nb = nanobind;

namespace multiring {

void bind_requests(nb::module_& m) {
  nb::class_<Request>(m, "Request")
      .def_prop_ro("number", &Request::number)
      .def_prop_ro("process_set", [](const Request& self) { return self.wanted().process_set; })
      .def_prop_ro("collective", [](const Request& self) { return self.wanted().collective; })
      .def_prop_ro("type", [](const Request& self) { return self.wanted().type; })
      .def_prop_ro("op", [](const Request& self) { return self.wanted().op; })
      .def_prop_ro("root", [](const Request& self) { return self.wanted().root; })
      .def_prop_ro("prescale", [](const Request& self) { return self.wanted().prescale; })
      .def_prop_ro("postscale", [](const Request& self) { return self.wanted().postscale; })
      .def_prop_ro("wants_rows", [](const Request& self) { return self.wanted().wants_rows != 0; })
      .def_prop_ro("name", [](const Request& self) { return nb::bytes(self.name().data(), self.name().size()); })
      .def_prop_ro("wire", [](const Request& self) { return nb::bytes(self.wire().data(), self.wire().size()); })
      .def_prop_ro("size_bytes", &Request::bytes, "The total size of all arrays in bytes.")
      .def_prop_ro("is_cancelled", [](const Request& self) { return self.is_cancelled.load(); })
      .def_prop_ro(
          "signature", [](const Request& self) { return nb::bytes(self.signature().data(), self.signature().size()); },
          "A key that is equal for requests that differ only in their arrays' memory.")
      .def_prop_ro("shapes",
                   [](const Request& self) {
                     std::vector<std::vector<int64_t>> shapes;
                     for (const auto& array : self.arrays()) shapes.push_back(array.shape);
                     return shapes;
                   })
      .def_prop_ro("splits",
                   [](const Request& self) -> nb::object {
                     return self.wanted().has_splits != 0 ? nb::cast(self.splits()) : nb::none();
                   })
      .def(
          "input",
          [](const Request& self, size_t array) { return reinterpret_cast<uintptr_t>(self.arrays().at(array).input); },
          nb::arg("array"), "Return the address of an array.")
      .def(
          "output",
          [](Request& self, size_t array, const std::vector<int64_t>& shape) {
            const WithoutGil release;
            return reinterpret_cast<uintptr_t>(self.output(array, shape));
          },
          nb::arg("array"), nb::arg("shape"), "Return the address of the memory for an array's result of this shape.")
      .def(
          "allocate",
          [](Request& self, size_t array, const std::vector<int64_t>& shape) {
            const WithoutGil release;
            return reinterpret_cast<uintptr_t>(self.allocate(array, shape));
          },
          nb::arg("array"), nb::arg("shape"),
          "Return the address of memory that the caller provides for another result.")
      .def(
          "pack", [](const Request& self, uintptr_t memory) { self.pack(reinterpret_cast<std::byte*>(memory)); },
          nb::arg("memory"), nb::call_guard<WithoutGil>(), "Copy all arrays to `memory`, one after another.")
      .def(
          "unpack", [](Request& self, uintptr_t memory) { self.unpack(reinterpret_cast<const std::byte*>(memory)); },
          nb::arg("memory"), nb::call_guard<WithoutGil>(),
          "Copy all results from `memory` to the outputs. They have their arrays' shapes.");
  nb::class_<RequestQueue>(m, "RequestQueue")
      .def(nb::init<>())
      .def_prop_ro(
          "address", [](RequestQueue& self) { return reinterpret_cast<uintptr_t>(self.entry()); },
          "The address of the MultiringEntry.")
      .def_prop_ro(
          "capsule", [](RequestQueue& self) { return nb::capsule(self.entry(), MULTIRING_ENTRY_NAME); },
          "The capsule for native code; see multiring.h.")
      .def_prop_ro("in_flight", &RequestQueue::in_flight, "The number of requests that have not ended.")
      .def("take", &RequestQueue::take, nb::call_guard<WithoutGil>(),
           "Wait for the next request, and return it together with the turn to submit it. A request that is cancelled "
           "after that is returned a second time.")
      .def("pass_turn", &RequestQueue::pass, nb::call_guard<WithoutGil>(),
           "Pass the turn on; return False if no thread waits for it.")
      .def("end", &RequestQueue::end, nb::arg("request"), nb::arg("error"), nb::arg("text"),
           nb::call_guard<WithoutGil>(), "Report the end of a request to its caller, unless it was reported before.")
      .def("cancel_all", &RequestQueue::cancel_all, nb::call_guard<WithoutGil>(),
           "Fail all requests in flight; return their number.")
      .def("close", &RequestQueue::close, "Make later requests fail at once.");
}

}  // namespace multiring
