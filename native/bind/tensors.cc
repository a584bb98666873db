// Bindings that read the layout of many tensors of a framework without a Python call for each tensor.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <utility>
#include <vector>

#include "bind.h"
#include "core/memory/footprint.h"

namespace nb = nanobind;

namespace multiring {
namespace {

// The part of DLPack's table of C functions that is used here, https://dmlc.github.io/dlpack/latest/c_api.html.
struct DLPackExchange {
  struct {
    uint32_t major;
    uint32_t minor;
    DLPackExchange* earlier;
  } header;
  void* unused[3];
  int (*fill)(void* object, nb::dlpack::dltensor* out);  // returns 0, or sets a Python error; may be null
};
constexpr uint32_t kMajor = 1;
constexpr int kHost = nb::device::cpu::value;

// Returns the table of a tensor type, or null if it has none of a known version. The table lives as long as the
// process.
const DLPackExchange* exchange_of(PyTypeObject* type) {
  const nb::object capsule =
      nb::steal(PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__"));
  void* table = capsule.is_valid() ? PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api") : nullptr;
  if (table == nullptr) PyErr_Clear();
  const auto* found = static_cast<const DLPackExchange*>(table);
  return found != nullptr && found->header.major == kMajor && found->fill != nullptr ? found : nullptr;
}

// Returns the size of a type's objects in bytes, or 0 if unknown. It asks the type, because the stable ABI of Python
// 3.12 and later has no tp_basicsize. The query takes as long as a small call, so the last answer is cached. The
// caller holds the GIL. If another type has got the same address, the result is only a wrong hint.
size_t bytes_of_each(const PyTypeObject* type) {
  static const PyTypeObject* asked = nullptr;
  static size_t answer = 0;
  if (type == asked) return answer;
  auto* object = reinterpret_cast<PyObject*>(const_cast<PyTypeObject*>(type));
  const nb::object size = nb::steal(PyObject_GetAttrString(object, "__basicsize__"));
  const Py_ssize_t bytes = size.is_valid() ? PyLong_AsSsize_t(size.ptr()) : -1;
  if (bytes < 0) PyErr_Clear();
  asked = type;
  return answer = bytes < 0 ? 0 : static_cast<size_t>(bytes);
}

// A list or a tuple. Its items are borrowed references.
class Sequence {
 public:
  explicit Sequence(nb::handle object) : object_(object.ptr()), is_list_(PyList_Check(object_)) {}
  bool is_one() const { return is_list_ || PyTuple_Check(object_); }
  size_t size() const {
    return static_cast<size_t>(is_list_ ? NB_LIST_GET_SIZE(object_) : NB_TUPLE_GET_SIZE(object_));
  }
  PyObject* operator[](size_t index) const {
    const auto at = static_cast<Py_ssize_t>(index);
    return is_list_ ? NB_LIST_GET_ITEM(object_, at) : NB_TUPLE_GET_ITEM(object_, at);
  }

  // Prefetches all objects at once, and then the targets of the pointers in them, where each tensor's memory is
  // described. The prefetches are hints: only the objects themselves are read.
  void prefetch() const {
    for (size_t i = 0; i < size(); ++i) __builtin_prefetch((*this)[i]);
    for (size_t i = 0; i < size(); ++i) {
      PyObject* object = (*this)[i];
      LineHints::fetch_behind(object, sizeof(PyObject), bytes_of_each(Py_TYPE(object)));
    }
  }

 private:
  PyObject* const object_;
  const bool is_list_;
};

// The identities and the memory layouts of several tensors of one type.
class Tensors {
 public:
  // Reads the tensors. Returns false if they are not all row-major in host memory with one element type, or if their
  // type does not support the table.
  bool read(nb::handle tensors, PyTypeObject* type) {
    exchange_ = exchange_of(type);
    const Sequence items(tensors);
    if (exchange_ == nullptr || !items.is_one()) return false;
    objects_.reserve(items.size());
    footprint_.reserve(items.size());
    items.prefetch();
    for (size_t i = 0; i < items.size(); ++i) {
      TensorView seen;
      if (!PyType_IsSubtype(Py_TYPE(items[i]), type) || !look(items[i], seen) || !footprint_.add(seen)) return false;
      objects_.push_back(items[i]);
    }
    return !objects_.empty();
  }

  // Returns whether `tensors` are the same objects with the same layout. The first success records the cache lines to
  // prefetch; many sequences are never checked a second time.
  bool is_of(nb::handle tensors) {
    const Sequence items(tensors);
    if (!items.is_one() || items.size() != objects_.size()) return false;
    hints_.fetch();
    for (size_t i = 0; i < objects_.size(); ++i) {
      TensorView seen;
      if (items[i] != objects_[i] || !look(items[i], seen) || !footprint_.has(i, seen)) return false;
    }
    if (hints_.empty()) {
      for (PyObject* tensor : objects_) expect(tensor);
    }
    return true;
  }

  uintptr_t address() const { return footprint_.address(); }
  nb::bytes form() const {
    const auto words = footprint_.form();
    return nb::bytes(words.data(), words.size() * sizeof(int64_t));
  }

 private:
  // Records the cache lines that a check of `tensor`, and a change of its version, will read.
  void expect(PyObject* tensor) {
    hints_.note(reinterpret_cast<uintptr_t>(tensor));
    const nb::object place = nb::steal(PyObject_GetAttrString(tensor, "_cdata"));
    const size_t start = place.is_valid() ? PyLong_AsSize_t(place.ptr()) : 0;
    if (PyErr_Occurred() != nullptr) {
      PyErr_Clear();
    } else if (start != 0) {
      hints_.note_tensor(start);
    }
  }

  // Reads the layout of a tensor. `view` points into the tensor and is valid as long as the tensor.
  bool look(PyObject* tensor, TensorView& view) const {
    nb::dlpack::dltensor seen;
    if (exchange_->fill(tensor, &seen) != 0) {
      PyErr_Clear();  // the tensor has no memory, or an element type that DLPack does not support
      return false;
    }
    view = {.address = reinterpret_cast<uintptr_t>(seen.data) + seen.byte_offset,
            .type = (int64_t{seen.dtype.code} << 32) | (int64_t{seen.dtype.bits} << 16) | seen.dtype.lanes,
            .is_on_host = seen.device.device_type == kHost,
            .dims = seen.ndim,
            .shape = seen.shape,
            .strides = seen.strides};
    return true;
  }

  const DLPackExchange* exchange_ = nullptr;
  std::vector<PyObject*> objects_;  // borrowed; used only for comparison
  Footprint footprint_;
  LineHints hints_;
};

}  // namespace

void bind_tensors(nb::module_& m) {
  nb::class_<Tensors>(m, "Footprint")
      .def_static(
          "of",
          [](nb::handle tensors, nb::handle type) -> nb::object {
            Tensors found;
            const bool is_type = PyType_Check(type.ptr());
            if (!is_type || !found.read(tensors, reinterpret_cast<PyTypeObject*>(type.ptr()))) return nb::none();
            return nb::cast(std::move(found));
          },
          nb::arg("tensors"), nb::arg("type"), nb::sig("def of(tensors: object, type: type) -> Footprint | None"),
          "Record the layout of a list or tuple of tensors. Return None unless all tensors are of this type, have one "
          "element type, and are row-major in host memory.")
      .def("is_of", &Tensors::is_of, nb::arg("tensors"),
           "Return whether these are the same objects with the same layout.")
      .def_prop_ro("address", &Tensors::address, "The address of the first tensor.")
      .def_prop_ro("form", &Tensors::form,
                   "A key that is equal for tensors with equal types, shapes and offsets from the first tensor.");
}

}  // namespace multiring
