// Where many tensors of a framework lie, read without a call of Python's for each of them.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "bind.h"

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
  const nb::object capsule = nb::steal(PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__"));
  void* table = capsule.is_valid() ? PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api") : nullptr;
  if (table == nullptr) PyErr_Clear();
  const auto* found = static_cast<const DLPackExchange*>(table);
  return found != nullptr && found->header.major == kMajor && found->fill != nullptr ? found : nullptr;
}

// Tensors of one type in host memory, each row by row: which objects they are, and where each of them lies.
class Footprint {
 public:
  // False: they are not all like that, or their type has no way to say so.
  bool read(nb::handle tensors, PyTypeObject* type) {
    exchange_ = exchange_of(type);
    if (exchange_ == nullptr || !is_sequence(tensors)) return false;
    const auto count = size_of(tensors);
    objects_.reserve(count);
    prefetch(tensors, count);
    for (size_t i = 0; i < count; ++i) {
      PyObject* tensor = item_of(tensors, i);
      nb::dlpack::dltensor seen;
      if (!PyType_IsSubtype(Py_TYPE(tensor), type) || !look(tensor, seen)) return false;
      if (i == 0) dtype_ = seen.dtype;
      if (!is_plain(seen)) return false;
      objects_.push_back(tensor);
      addresses_.push_back(address_of(seen));
      dims_.push_back(seen.ndim);
      sizes_.insert(sizes_.end(), seen.shape, seen.shape + seen.ndim);
    }
    return count > 0;
  }

  // Whether these are the same objects, and lie as they did. Many never come again: what a look fetches is noted in the first.
  bool is_of(nb::handle tensors) {
    if (!is_sequence(tensors) || size_of(tensors) != objects_.size()) return false;
    for (const uintptr_t line : lines_) __builtin_prefetch(reinterpret_cast<const void*>(line));
    size_t place = 0;
    for (size_t i = 0; i < objects_.size(); ++i) {
      PyObject* tensor = item_of(tensors, i);
      nb::dlpack::dltensor seen;
      if (tensor != objects_[i] || !look(tensor, seen) || address_of(seen) != addresses_[i] || seen.ndim != dims_[i]) return false;
      if (!is_plain(seen) || !std::equal(seen.shape, seen.shape + seen.ndim, sizes_.begin() + static_cast<ptrdiff_t>(place))) return false;
      place += static_cast<size_t>(seen.ndim);
    }
    if (lines_.empty()) std::for_each(objects_.begin(), objects_.end(), [this](PyObject* tensor) { expect(tensor); });
    return true;
  }

  uintptr_t address() const { return addresses_.front(); }

  // Equal for tensors that lie to each other alike, wherever the first of them is.
  nb::bytes form() const {
    std::vector<int64_t> words{(int64_t{dtype_.code} << 32) | (int64_t{dtype_.bits} << 16) | dtype_.lanes};
    words.reserve(1 + 2 * dims_.size() + sizes_.size());
    for (size_t i = 0; i < dims_.size(); ++i) {
      words.push_back(static_cast<int64_t>(addresses_[i] - address()));
      words.push_back(dims_[i]);
    }
    words.insert(words.end(), sizes_.begin(), sizes_.end());
    return nb::bytes(words.data(), words.size() * sizeof(int64_t));
  }

 private:
  static bool is_sequence(nb::handle tensors) { return PyList_Check(tensors.ptr()) || PyTuple_Check(tensors.ptr()); }
  static size_t size_of(nb::handle tensors) {
    return static_cast<size_t>(PyList_Check(tensors.ptr()) ? NB_LIST_GET_SIZE(tensors.ptr()) : NB_TUPLE_GET_SIZE(tensors.ptr()));
  }
  static PyObject* item_of(nb::handle tensors, size_t index) {  // borrowed
    const auto at = static_cast<Py_ssize_t>(index);
    return PyList_Check(tensors.ptr()) ? NB_LIST_GET_ITEM(tensors.ptr(), at) : NB_TUPLE_GET_ITEM(tensors.ptr(), at);
  }
  static uintptr_t address_of(const nb::dlpack::dltensor& seen) { return reinterpret_cast<uintptr_t>(seen.data) + seen.byte_offset; }

  // Has the objects fetched from memory all at once, and then what their words point to: somewhere there each tensor's own memory
  // is described. Also these are hints: nothing is read but the objects.
  static void prefetch(nb::handle tensors, size_t count) {
    for (size_t i = 0; i < count; ++i) __builtin_prefetch(item_of(tensors, i));
    for (size_t i = 0; i < count; ++i) {
      PyObject* object = item_of(tensors, i);
      const size_t size = std::min<size_t>(static_cast<size_t>(Py_TYPE(object)->tp_basicsize), kLineBytes);
      for (size_t at = sizeof(PyObject); at + sizeof(uintptr_t) <= size; at += sizeof(uintptr_t)) {
        uintptr_t word = 0;
        std::memcpy(&word, reinterpret_cast<const std::byte*>(object) + at, sizeof word);
        if (!is_likely(word)) continue;
        for (size_t offset = 0; offset < kTensorBytes; offset += kLineBytes) __builtin_prefetch(reinterpret_cast<const void*>(word + offset));
      }
    }
  }

  // Notes what a look at `tensor`, and a change of its version, will fetch from memory. It is a hint and no more: nothing is read
  // there but of the object behind `_cdata`, which is longer than a line, and what its first words point to may be anything.
  void expect(PyObject* tensor) {
    note_line(reinterpret_cast<uintptr_t>(tensor));
    const nb::object place = nb::steal(PyObject_GetAttrString(tensor, "_cdata"));
    const size_t start = place.is_valid() ? PyLong_AsSize_t(place.ptr()) : 0;
    if (PyErr_Occurred() != nullptr) {
      PyErr_Clear();
      return;
    }
    if (start == 0) return;
    for (size_t offset = 0; offset < kTensorBytes + kLineBytes; offset += kLineBytes) note_line(start + std::min(offset, kTensorBytes - 1));
    Words words{};
    std::memcpy(words.data(), reinterpret_cast<const void*>(start), kLineBytes);
    for (size_t at = 1; at < words.size(); ++at) {  // the first leads to code
      if (words[at] != others_[at]) note_line(words[at]);  // what all have in common is fetched once anyway
    }
    others_ = words;
  }

  void note_line(uintptr_t address) {
    if (is_likely(address)) lines_.push_back(address & ~(kLineBytes - 1));
  }
  static bool is_likely(uintptr_t address) { return address > kLeastAddress && address < kMostAddress; }

  bool look(PyObject* tensor, nb::dlpack::dltensor& seen) const {
    if (exchange_->fill(tensor, &seen) == 0) return true;
    PyErr_Clear();  // it has no memory, or a type that DLPack does not know
    return false;
  }

  bool is_plain(const nb::dlpack::dltensor& seen) const {
    if (seen.device.device_type != kHost || seen.dtype != dtype_) return false;
    int64_t stride = 1;
    bool is_dense = true;
    for (int32_t dim = seen.ndim - 1; dim >= 0; --dim) {
      if (seen.shape[dim] == 0) return true;
      is_dense = is_dense && (seen.shape[dim] == 1 || seen.strides == nullptr || seen.strides[dim] == stride);
      stride *= seen.shape[dim];
    }
    return is_dense;
  }

  static constexpr uintptr_t kLineBytes = 64;
  static constexpr size_t kTensorBytes = 176;  // of torch 2.13's TensorImpl
  static constexpr uintptr_t kLeastAddress = uintptr_t{1} << 16;
  static constexpr uintptr_t kMostAddress = uintptr_t{1} << 47;

  using Words = std::array<uintptr_t, kLineBytes / sizeof(uintptr_t)>;

  const DLPackExchange* exchange_ = nullptr;
  nb::dlpack::dtype dtype_{};
  std::vector<PyObject*> objects_;  // not held
  std::vector<uintptr_t> lines_;    // of the cache, that they are expected in
  Words others_{};                  // of the tensor before
  std::vector<uintptr_t> addresses_;
  std::vector<int32_t> dims_;
  std::vector<int64_t> sizes_;  // of all, one after the other
};

}  // namespace

void bind_tensors(nb::module_& m) {
  nb::class_<Footprint>(m, "Footprint")
      .def_static(
          "of",
          [](nb::handle tensors, nb::handle type) -> nb::object {
            Footprint found;
            if (!PyType_Check(type.ptr()) || !found.read(tensors, reinterpret_cast<PyTypeObject*>(type.ptr()))) return nb::none();
            return nb::cast(std::move(found));
          },
          nb::arg("tensors"), nb::arg("type"), nb::sig("def of(tensors: object, type: type) -> Footprint | None"),
          "Where a list or tuple of tensors lies; None unless all are of this type, alike, and row by row in host memory.")
      .def("is_of", &Footprint::is_of, nb::arg("tensors"), "Whether these are the same objects, and lie as they did.")
      .def_prop_ro("address", &Footprint::address, "Of the first of them.")
      .def_prop_ro("form", &Footprint::form, "Equal for tensors that lie to each other alike, wherever the first one is.");
}

}  // namespace multiring
