#pragma once

#include <nanobind/nanobind.h>

#include "core/context.h"

namespace multiring {

struct Rounds {
  std::shared_ptr<const std::vector<Round>> list;
};

// True once the operation has ended; false after `timeout_s`. Lets go of the GIL; raises what a signal's handler raises.
bool wait_for(Context& context, const std::shared_ptr<Operation>& operation, double timeout_s);

void bind_faults(nanobind::module_& m);
void bind_arrays(nanobind::module_& m);
void bind_tensors(nanobind::module_& m);
void bind_operations(nanobind::module_& m);
void bind_repeats(nanobind::module_& m);
void bind_context(nanobind::module_& m);
void bind_notices(nanobind::module_& m);
void bind_context_notices(nanobind::class_<Context>& context);
void bind_ending(nanobind::module_& m);

}  // namespace multiring
