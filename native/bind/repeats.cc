// Bindings that repeat a group's cached blocking calls without running Python code.

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "bind.h"
#include "core/rank/repeated_calls.h"

namespace nb = nanobind;

namespace multiring {
namespace {

// The memory of a NumPy array. It is valid only for a contiguous, row-major, writable array.
class Memory {
 public:
  explicit Memory(PyObject* array) {
    if (PyObject_GetBuffer(array, &view_, PyBUF_ND | PyBUF_FORMAT | PyBUF_WRITABLE) != 0) {
      PyErr_Clear();
      return;
    }
    held_ = true;
  }
  ~Memory() {
    if (held_) PyBuffer_Release(&view_);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // Writes format and dimensions to `shape`. Returns false for an unsuitable array.
  bool describe(CallShape& shape) const {
    if (!held_ || view_.ndim > CallShape::kMostDims || view_.format == nullptr) return false;
    if (view_.format[0] == 0 || view_.format[1] != 0) return false;  // only one-letter formats
    shape.format = view_.format[0];
    shape.dims = static_cast<int8_t>(view_.ndim);
    std::copy_n(view_.shape, view_.ndim, shape.sizes.begin());
    return true;
  }
  std::byte* data() const { return static_cast<std::byte*>(view_.buf); }

 private:
  Py_buffer view_{};
  bool held_ = false;
};

bool op_of(PyObject* op, uint8_t& index) {
  static constexpr std::array<std::string_view, 5> kOps{"sum", "average", "min", "max", "product"};
  if (!PyUnicode_CheckExact(op)) return false;
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(op, &size);
  if (text == nullptr) {
    PyErr_Clear();
    return false;
  }
  const auto found = std::find(kOps.begin(), kOps.end(), std::string_view(text, static_cast<size_t>(size)));
  index = static_cast<uint8_t>(found - kOps.begin());
  return found != kOps.end();
}

// Posts operations, and holds references to their memory until they have ended.
class Holdings {
 public:
  explicit Holdings(nb::object context)
      : owner_(std::move(context)), context_(nb::cast<Context&>(owner_)), held_(context_) {}
  Context& context() const { return context_; }

  // No Python code, such as a signal handler, runs between posting and holding.
  std::shared_ptr<Operation> post(OperationSpec spec, bool caller_waits, nb::object memory) {
    std::shared_ptr<Operation> operation;
    {
      const WithoutGil release;
      operation = context_.post(std::move(spec), caller_waits);
    }
    hold(operation, std::move(memory));
    return operation;
  }

  void hold(const std::shared_ptr<Operation>& operation, nb::object memory) {
    const auto dead = held_.hold(operation, std::move(memory));
  }
  void release(const std::shared_ptr<Operation>& operation) { const nb::object dead = held_.release(operation); }

 private:
  nb::object owner_;
  Context& context_;
  HeldMemory<nb::object> held_;
};

// The cached blocking calls of a group, for Python.
class Repeats {
 public:
  Repeats(nb::object holdings, uint64_t group, std::shared_ptr<SharedSlots> slots, uint64_t steps, double patience_s,
          uint64_t pause_every, nb::object array_type)
      : owner_(std::move(holdings)), holdings_(nb::cast<Holdings&>(owner_)),
        calls_(holdings_.context(), group, std::move(slots), steps, pause_every), patience_s_(patience_s),
        array_type_(std::move(array_type)) {}

  uint64_t next() { return calls_.next(); }
  uint64_t last() const { return calls_.last(); }
  std::shared_ptr<SharedSlots> slots() const { return calls_.slots(); }
  void forget() { calls_.forget(); }

  void remember(const OperationSpec& spec, nb::handle array, nb::handle op) {
    CallShape shape{.name = spec.name};
    if (array.is_none()) {
      shape.dims = -1;
    } else if (!is_call(array, op, shape) || !Memory(array.ptr()).describe(shape)) {
      return;
    }
    calls_.remember(shape, spec);
  }

  // No Python code runs between taking a sequence number and posting.
  std::shared_ptr<Operation> post_again(const OperationSpec& model, nb::object memory) {
    return holdings_.post(calls_.next_of(model), true, std::move(memory));
  }

  nb::object all_reduce(uint32_t name, nb::handle array, nb::handle op) {
    CallShape shape{.name = name};
    if (!is_call(array, op, shape)) return nb::none();
    const Memory memory(array.ptr());
    if (!memory.describe(shape)) return nb::none();
    return run(shape, memory.data(), array);
  }
  nb::object barrier(uint32_t name) { return run(CallShape{.name = name, .dims = -1}, nullptr, nb::none()); }

 private:
  bool is_call(nb::handle array, nb::handle op, CallShape& shape) const {
    return Py_TYPE(array.ptr()) == reinterpret_cast<PyTypeObject*>(array_type_.ptr()) && op_of(op.ptr(), shape.op);
  }

  // Returns True if the call is done, an Operation if it is unfinished or has failed, and None if nothing was started.
  nb::object run(const CallShape& shape, std::byte* data, nb::handle array) {
    auto [is_done, operation, model] = calls_.attempt(shape, data);
    if (is_done) return nb::bool_(true);
    if (model == nullptr) return nb::none();
    if (operation) {
      holdings_.hold(operation, nb::borrow(array));
    } else {
      operation = holdings_.post(calls_.next_of(*model, data), true, nb::borrow(array));
    }
    const bool has_ended = wait_for(holdings_.context(), operation, patience_s_);
    if (!has_ended || operation->fault() != FaultKind::none) return nb::cast(operation);
    holdings_.release(operation);
    return nb::bool_(true);
  }

  nb::object owner_;
  Holdings& holdings_;
  RepeatedCalls calls_;
  const double patience_s_;
  const nb::object array_type_;
};

}  // namespace

void bind_repeats(nb::module_& m) {
  nb::class_<SharedSlots>(m, "SharedSlots")
      .def(
          "__init__",
          [](SharedSlots* self, Context& context, const std::vector<int>& members, uint64_t steps) {
            new (self) SharedSlots(context.rank(), members, steps, context.own_segment());
          },
          nb::arg("context"), nb::arg("members"), nb::arg("steps"),
          "The slots for small operations of a group on one host.")
      .def(
          "recycle", [](SharedSlots& slots, Context& context) { context.recycle(slots); }, nb::arg("context"),
          nb::call_guard<nb::gil_scoped_release>(),
          "Give this rank's slots to the next group. No rank may use this group any more.")
      .def_prop_ro_static("CAPACITY", [](nb::handle) { return SharedSlots::kCapacity; },
                          "The largest payload in bytes.");
  nb::class_<Holdings>(m, "Holdings")
      .def(nb::init<nb::object>(), nb::arg("context"))
      .def("post", &Holdings::post, nb::arg("spec"), nb::arg("caller_waits"), nb::arg("memory").none(),
           "Start an operation, and keep its memory alive until it has ended.")
      .def("release", &Holdings::release, nb::arg("operation"),
           "Release the memory of an operation that has ended.");
  nb::class_<Repeats>(m, "Repeats")
      .def(nb::init<nb::object, uint64_t, std::shared_ptr<SharedSlots>, uint64_t, double, uint64_t, nb::object>(),
           nb::arg("holdings"), nb::arg("group"), nb::arg("slots").none(), nb::arg("steps"), nb::arg("patience_s"),
           nb::arg("pause_every"), nb::arg("array_type"))
      .def("next", &Repeats::next, "Return the group's next sequence number.")
      .def_prop_ro("last", &Repeats::last, "The last sequence number given out; 0 if there is none.")
      .def_prop_ro("slots", &Repeats::slots)
      .def("remember", &Repeats::remember, nb::arg("spec"), nb::arg("array").none(), nb::arg("op").none(),
           "Cache this call, so that `all_reduce` or `barrier` can repeat it.")
      .def("all_reduce", &Repeats::all_reduce, nb::arg("name"), nb::arg("array").none(), nb::arg("op").none(),
           "Repeat a cached call. Return True if it is done, the Operation if it is unfinished or has failed, and None "
           "if the call is not cached and nothing was started.")
      .def("barrier", &Repeats::barrier, nb::arg("name"), "Repeat a cached barrier; see `all_reduce`.")
      .def("post_again", &Repeats::post_again, nb::arg("model"), nb::arg("memory").none(),
           "Start an operation like `model` with the group's next sequence number. This thread must wait for it next.")
      .def("forget", &Repeats::forget, "Clear the cache of calls.");
}

}  // namespace multiring
