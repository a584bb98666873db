#pragma once

#include <nanobind/nanobind.h>

#include "core/context.h"

namespace multiring {

struct Rounds {
  std::shared_ptr<const std::vector<Round>> list;
};

// Lets go of the GIL, as nb::gil_scoped_release does, but for how a thread ends that wants it back while the
// interpreter is ending. Before Python 3.14 that thread is unwound there and then, by force; on its way stand functions
// that may not be left so, and the process ends with "terminate called without an active exception", whatever the
// program's own exit status. It sleeps instead, until the process is gone
// (https://github.com/python/cpython/issues/87135).
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { take_back(state_); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  static void take_back(PyThreadState* state);
  PyThreadState* const state_;
};

// True once the operation has ended; false after `timeout_s`. Lets go of the GIL; raises what a signal's handler
// raises.
bool wait_for(Context& context, const std::shared_ptr<Operation>& operation, double timeout_s);

void bind_faults(nanobind::module_& m);
void bind_arrays(nanobind::module_& m);
void bind_file_rows(nanobind::module_& m);
void bind_tensors(nanobind::module_& m);
void bind_operations(nanobind::module_& m);
void bind_repeats(nanobind::module_& m);
void bind_context(nanobind::module_& m);
void bind_control_messages(nanobind::module_& m);
void bind_context_control(nanobind::class_<Context>& context);
void bind_ending(nanobind::module_& m);
void bind_requests(nanobind::module_& m);

}  // namespace multiring
