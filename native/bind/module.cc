// The extension module multiring._native._core: one line for each class and function of the core.

#include <nanobind/nanobind.h>

NB_MODULE(_core, m) {
  m.doc() = "multiring's compiled core; import it through multiring._native.";
  m.attr("VERSION") = MULTIRING_VERSION;
}
