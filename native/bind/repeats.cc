// Blocking calls of a group that have been made before, made again without Python in between.

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include "bind.h"
#include "core/shared_slots.h"

namespace nb = nanobind;

namespace multiring {
namespace {

constexpr size_t kMostKept = 256;
constexpr int kMostDims = 4;

// What tells two calls apart; the ranks agree on more (the plan), which follows from it.
struct Shape {
  uint32_t name = 0;
  char format = 0;  // of the buffer protocol, native byte order
  uint8_t op = 0;
  int8_t dims = 0;
  std::array<Py_ssize_t, kMostDims> sizes{};
  bool operator==(const Shape&) const = default;
};

// The memory of a NumPy array, as long as it is dense, row-major and can be written.
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

  bool describe(Shape& shape) const {
    if (!held_ || view_.ndim > kMostDims || view_.format == nullptr || view_.format[0] == 0 || view_.format[1] != 0) return false;
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

// What operations in flight work on. It belongs to the process: whoever drops handle, array and group must not free
// memory that ranks still read and write.
class Holdings {
 public:
  explicit Holdings(nb::object context) : owner_(std::move(context)), context_(nb::cast<Context&>(owner_)) {}
  Context& context() const { return context_; }

  // Nothing of Python's, a signal's handler least of all, comes between posting and holding.
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
    std::vector<nb::object> dead;  // let go of last: that may run any code
    if (held_.size() >= sweep_at_) {
      for (auto at = held_.begin(); at != held_.end();) {
        const bool ended = context_.has_ended(*at->first);
        if (ended) dead.push_back(std::move(at->second));
        at = ended ? held_.erase(at) : std::next(at);
      }
      sweep_at_ = held_.size() < kFew ? 0 : 2 * held_.size();  // what many handles in flight cost stays linear
    }
    held_.insert_or_assign(operation, std::move(memory));
  }

  // The operation has ended.
  void release(const std::shared_ptr<Operation>& operation) {
    const auto found = held_.find(operation);
    if (found == held_.end()) return;
    const nb::object dead = std::move(found->second);
    held_.erase(found);
  }

 private:
  nb::object owner_;
  Context& context_;
  static constexpr size_t kFew = 8;
  std::map<std::shared_ptr<Operation>, nb::object> held_;
  size_t sweep_at_ = 0;
};

class Repeats {
 public:
  Repeats(nb::object holdings, uint64_t group, std::shared_ptr<SharedSlots> slots, uint64_t steps, double patience_s, uint64_t pause_every, nb::object array_type)
      : owner_(std::move(holdings)), holdings_(nb::cast<Holdings&>(owner_)), context_(holdings_.context()), group_(group),
        slots_(std::move(slots)), steps_(steps), patience_s_(patience_s), pause_every_(pause_every), array_type_(std::move(array_type)) {}

  uint64_t next() { return sequence_.fetch_add(steps_) + steps_; }
  uint64_t last() const { return sequence_.load(); }
  std::shared_ptr<SharedSlots> slots() const { return slots_; }

  // From now on a call like that of `array` runs as `spec`, under other sequence numbers.
  void remember(const OperationSpec& spec, nb::handle array, nb::handle op) {
    if (context_.logs_moves()) return;  // a repeated call leaves no log behind
    Shape shape{.name = spec.name};
    if (!array.is_none() && !shape_of(array, op, shape)) return;
    if (array.is_none()) shape.dims = -1;
    if (find(shape) != nullptr) return;
    if (known_.size() == kMostKept) known_.erase(known_.begin());
    known_.emplace_back(shape, spec);
  }

  // Nothing of Python's comes between taking a number and posting.
  std::shared_ptr<Operation> post_again(const OperationSpec& model, nb::object memory) {
    OperationSpec spec = model;
    spec.key = {group_, next()};
    return holdings_.post(std::move(spec), true, std::move(memory));
  }

  nb::object all_reduce(uint32_t name, nb::handle array, nb::handle op) {
    Shape shape{.name = name};
    if (Py_TYPE(array.ptr()) != reinterpret_cast<PyTypeObject*>(array_type_.ptr()) || !op_of(op.ptr(), shape.op)) return nb::none();
    const Memory memory(array.ptr());
    if (!memory.describe(shape)) return nb::none();
    return run(shape, memory.data(), array);
  }

  void forget() { known_.clear(); }

  nb::object barrier(uint32_t name) { return run(Shape{.name = name, .dims = -1}, nullptr, nb::none()); }

 private:
  bool shape_of(nb::handle array, nb::handle op, Shape& shape) const {
    if (Py_TYPE(array.ptr()) != reinterpret_cast<PyTypeObject*>(array_type_.ptr()) || !op_of(op.ptr(), shape.op)) return false;
    return Memory(array.ptr()).describe(shape);
  }

  const OperationSpec* find(const Shape& shape) {
    for (auto at = known_.rbegin(); at != known_.rend(); ++at) {
      if (at->first == shape) return &at->second;
    }
    return nullptr;
  }

  // True: done. An operation: it goes on, or failed. None: not begun.
  nb::object run(const Shape& shape, std::byte* data, nb::handle array) {
    const OperationSpec* model = find(shape);
    if (model == nullptr) return nb::none();
    if (pause_every_ != 0 && (sequence_.load() / steps_ + 1) % pause_every_ == 0) return nb::none();  // the caller has more to do there
    std::shared_ptr<Operation> operation;
    if (model->meets) {
      auto attempt = context_.meet(*model, {group_, sequence_, steps_}, data);
      if (attempt.is_done) return nb::bool_(true);
      operation = std::move(attempt.operation);
    }
    if (!operation) {
      OperationSpec spec = *model;
      spec.key = {group_, next()};
      spec.bases[1] = data;
      operation = holdings_.post(std::move(spec), true, nb::borrow(array));
    } else {
      holdings_.hold(operation, nb::borrow(array));
    }
    if (!wait_for(context_, operation, patience_s_) || operation->fault() != FaultKind::none) return nb::cast(operation);
    holdings_.release(operation);
    return nb::bool_(true);
  }

  nb::object owner_;
  Holdings& holdings_;
  Context& context_;
  const uint64_t group_;
  const std::shared_ptr<SharedSlots> slots_;
  const uint64_t steps_;
  const double patience_s_;
  const uint64_t pause_every_;  // operations; 0: never
  const nb::object array_type_;
  std::atomic<uint64_t> sequence_{0};
  std::vector<std::pair<Shape, OperationSpec>> known_;  // newest last
};

}  // namespace

void bind_repeats(nb::module_& m) {
  nb::class_<SharedSlots>(m, "SharedSlots")
      .def(
          "__init__",
          [](SharedSlots* self, Context& context, const std::vector<int>& members, uint64_t steps) {
            new (self) SharedSlots(context.rank(), members, steps, context.own_segment());
          },
          nb::arg("context"), nb::arg("members"), nb::arg("steps"), "The slots in which ranks of one host meet.")
      .def_prop_ro_static("CAPACITY", [](nb::handle) { return SharedSlots::kCapacity; }, "Bytes of payload.");
  nb::class_<Holdings>(m, "Holdings")
      .def(nb::init<nb::object>(), nb::arg("context"))
      .def("post", &Holdings::post, nb::arg("spec"), nb::arg("caller_waits"), nb::arg("memory").none(),
           "Start an operation, and keep what it works on until it has ended.")
      .def("release", &Holdings::release, nb::arg("operation"), "Let go of what an operation that has ended worked on.");
  nb::class_<Repeats>(m, "Repeats")
      .def(nb::init<nb::object, uint64_t, std::shared_ptr<SharedSlots>, uint64_t, double, uint64_t, nb::object>(), nb::arg("holdings"),
           nb::arg("group"), nb::arg("slots").none(), nb::arg("steps"), nb::arg("patience_s"), nb::arg("pause_every"),
           nb::arg("array_type"))
      .def("next", &Repeats::next, "The group's next sequence number.")
      .def_prop_ro("last", &Repeats::last, "The sequence number given last; 0: none was.")
      .def_prop_ro("slots", &Repeats::slots)
      .def("remember", &Repeats::remember, nb::arg("spec"), nb::arg("array").none(), nb::arg("op").none(),
           "From now on `all_reduce`, or `barrier`, knows calls like this one.")
      .def("all_reduce", &Repeats::all_reduce, nb::arg("name"), nb::arg("array").none(), nb::arg("op").none(),
           "True: done. An Operation: it goes on, or has failed. None: nothing was begun, the call is not known.")
      .def("barrier", &Repeats::barrier, nb::arg("name"), "As all_reduce.")
      .def("post_again", &Repeats::post_again, nb::arg("model"), nb::arg("memory").none(),
           "Start what was started before, as the group's next operation; this thread waits for it next.")
      .def("forget", &Repeats::forget, "Know no calls any more.");
}

}  // namespace multiring
