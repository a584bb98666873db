// Where many tensors of a framework lie, read without a call of Python's for each of them.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <utility>
#include <vector>

#include "bind.h"
#include "core/footprint.h"

namespace nb = nanobind;

namespace multiring {
namespace {

// DLPack's table of C functions, https://dmlc.github.io/dlpack/latest/c_api.html: what of it is needed here.
struct DLPackExchange {
  struct {
    uint32_t major;
    uint32_t minor;
    DLPackExchange* earlier;
  } header;
  void* unused[3];
  int (*fill)(void* object, nb::dlpack::dltensor* out);  // 0, or a Python error is set; may be null
};
constexpr uint32_t kMajor = 1;
constexpr int kHost = nb::device::cpu::value;

// The table of a tensor type, null where it has none that is understood. It lives as long as the process.
const DLPackExchange* exchange_of(PyTypeObject* type) {
  const nb::object capsule =
      nb::steal(PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__"));
  void* table = capsule.is_valid() ? PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api") : nullptr;
  if (table == nullptr) PyErr_Clear();
  const auto* found = static_cast<const DLPackExchange*>(table);
  return found != nullptr && found->header.major == kMajor && found->fill != nullptr ? found : nullptr;
}

// How large a type's objects are, 0 if it does not say: the stable ABI of Python 3.12 and later has no tp_basicsize.
// A type is asked once in a row, as that takes as long as a small call should. The GIL is held; where another type has
// come to the same address the hint is a wrong one, and no more.
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

// A list or a tuple; its items are borrowed.
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

  // Has the objects fetched from memory all at once, and then what their words point to: somewhere there each tensor's
  // own memory is described. Also these are hints: nothing is read but the objects.
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

// Tensors of one type: which objects they are, and where each of them lies.
class Tensors {
 public:
  // False: they do not lie alike, row by row in host memory, or their type has no way to say so.
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

  // Many never come again: what a look fetches is noted in the first.
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
  // Notes what a look at `tensor`, and a change of its version, will fetch from memory.
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

  // Valid as long as the tensor.
  bool look(PyObject* tensor, TensorView& view) const {
    nb::dlpack::dltensor seen;
    if (exchange_->fill(tensor, &seen) != 0) {
      PyErr_Clear();  // it has no memory, or a type that DLPack does not know
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
  std::vector<PyObject*> objects_;  // not held
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
          "Where a list or tuple of tensors lies; None unless all are of this type, alike, and row by row in host "
          "memory.")
      .def("is_of", &Tensors::is_of, nb::arg("tensors"), "Whether these are the same objects, and lie as they did.")
      .def_prop_ro("address", &Tensors::address, "Of the first of them.")
      .def_prop_ro("form", &Tensors::form,
                   "Equal for tensors that lie to each other alike, wherever the first one is.");
}

}  // namespace multiring
