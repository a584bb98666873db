// Bindings that read rows of files directly into a batch.

#include "core/memory/file_rows.h"

#include <nanobind/ndarray.h>

#include "bind.h"

namespace nb = nanobind;

namespace multiring {
namespace {

using RowMemory = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using RowNumbers = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using RowDescriptors = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

size_t read_rows_into(const RowDescriptors& descriptors, const RowNumbers& begins, const RowMemory& rows,
                      const RowNumbers& tail_bytes, const RowMemory& tails) {
  const size_t count = begins.size();
  if (!count) return 0;
  size_t behind = 0;
  for (size_t i = 0; i < tail_bytes.size(); ++i) {
    if (tail_bytes.data()[i] < 0) throw nb::value_error("read_rows: a negative number in tail_bytes; want 0 or more");
    behind += static_cast<size_t>(tail_bytes.data()[i]);
  }
  if (descriptors.size() != count || tail_bytes.size() != count || rows.size() % count || behind != tails.size()) {
    throw nb::value_error(
        "read_rows: want as many descriptors and tail_bytes as there are begins, and memory of their sizes");
  }
  const FileRows wanted{.descriptors = {descriptors.data(), count},
                        .begins = {begins.data(), count},
                        .row_bytes = rows.size() / count,
                        .rows = reinterpret_cast<std::byte*>(rows.data()),
                        .tail_bytes = {tail_bytes.data(), count},
                        .tails = reinterpret_cast<std::byte*>(tails.data())};
  const WithoutGil release;
  return read_rows(wanted);
}

}  // namespace

void bind_file_rows(nb::module_& m) {
  m.def("read_rows", &read_rows_into, nb::arg("descriptors"), nb::arg("begins"), nb::arg("rows"),
        nb::arg("tail_bytes"), nb::arg("tails"),
        "Read rows of equal size, which start at `begins` of their files, into `rows`, and the bytes after each row "
        "into `tails`. Return the number of complete rows.");
}

}  // namespace multiring
