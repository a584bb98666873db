// Ends a process whose exit a library could block for ever.

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
    "multiring: the job failed, and MPI_Finalize has waited 5 s for lost ranks; ending without it\n";

// Runs after the interpreter's own exit functions and before functions that were registered earlier, such as mpi4py's
// MPI_Finalize.
void watch_the_end() {
  std::thread([] {
    std::this_thread::sleep_for(kPatience);
    [[maybe_unused]] const auto told = ::write(STDERR_FILENO, kWords.data(), kWords.size());
    ::_exit(1);
  }).detach();
}

}  // namespace

void WithoutGil::take_back(PyThreadState* state) {
  // The destructor runs in the innermost frame, before the unwinding reaches a frame that ends the process.
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
      "Make this process end even if MPI_Finalize, at the process's exit, waits for lost ranks.");
}

}  // namespace multiring
