// The extension module multiring._native._core. It calls one function per part of the core.

#include <nanobind/nanobind.h>

#include "bind.h"

NB_MODULE(_core, m) {
  m.doc() = "multiring's compiled core; import it through multiring._native.";
  // Global objects of the program and of torch outlive the interpreter; nanobind would report each as a leak.
  nanobind::set_leak_warnings(false);
  m.attr("VERSION") = MULTIRING_VERSION;
  multiring::bind_faults(m);
  multiring::bind_arrays(m);
  multiring::bind_file_rows(m);
  multiring::bind_tensors(m);
  multiring::bind_operations(m);
  multiring::bind_repeats(m);
  multiring::bind_control_messages(m);
  multiring::bind_context(m);
  multiring::bind_ending(m);
  multiring::bind_requests(m);
  multiring::bind_seals(m);
}
