#pragma once

#include <nanobind/nanobind.h>

namespace multiring {

void bind_faults(nanobind::module_& m);
void bind_arrays(nanobind::module_& m);
void bind_operations(nanobind::module_& m);
void bind_context(nanobind::module_& m);

}  // namespace multiring
