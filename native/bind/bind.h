#pragma once

#include <nanobind/nanobind.h>

#include "core/rank/context.h"

namespace multiring {

struct Rounds {
  std::shared_ptr<const std::vector<Round>> list;
};

// Releases the GIL like nb::gil_scoped_release, but is safe while the interpreter shuts down. Before Python 3.14, a
// thread that reacquires the GIL during shutdown is unwound by force. The unwinding reaches functions that do not
// permit it, and the process ends with "terminate called without an active exception" instead of the program's exit
// status. With this class, such a thread sleeps until the process has ended
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

// Waits for an operation without holding the GIL. Returns true once the operation has ended, and false after
// `timeout_s` seconds. Throws the exception of a Python signal handler.
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
void bind_seals(nanobind::module_& m);

}  // namespace multiring
