// The end of a process that a library's own end would hold up for ever.

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <string_view>
#include <thread>

#include "bind.h"

namespace nb = nanobind;

namespace multiring {
namespace {

constexpr auto kPatience = std::chrono::seconds(5);
constexpr std::string_view kWords =
    "multiring: the job failed, and MPI_Finalize has waited 5 s for ranks that do not come; ending without it\n";

// Runs after everything of Python's, and before what was registered earlier: MPI_Finalize by mpi4py.
void watch_the_end() {
  std::thread([] {
    std::this_thread::sleep_for(kPatience);
    [[maybe_unused]] const auto told = ::write(STDERR_FILENO, kWords.data(), kWords.size());
    ::_exit(1);
  }).detach();
}

}  // namespace

void WithoutGil::take_back(PyThreadState* state) {
  // Its destructor runs in the innermost frame, before the unwinding comes to one that ends the process.
  struct Sleep {
    ~Sleep() {
      while (!has_it) ::pause();
    }
    bool has_it = false;
  } sleep;
  PyEval_RestoreThread(state);
  sleep.has_it = true;
}

void bind_ending(nb::module_& m) {
  m.def(
      "end_without_mpi",
      [] {
        static std::atomic<bool> is_set{false};
        if (!is_set.exchange(true)) Py_AtExit(&watch_the_end);
      },
      "This process is to end even if MPI_Finalize, called as the last thing in it, waits for ranks that are gone.");
}

}  // namespace multiring
