// The end of a process: a library could block it for ever, or a thread that is still in a library's call could abort it.

#include <cxxabi.h>
#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <exception>
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

std::terminate_handler other_handler = nullptr;

int (*is_interpreter_ending)() = nullptr;

// Linux gives the first thread of a process the number of the process.
bool is_first_thread() { return ::gettid() == ::getpid(); }

// Replaces std::terminate's handler. A forced unwinding is no C++ exception, so none is active here; the process's own
// faults keep their abort: an exception that nobody catches, and a std::thread destroyed by the thread that ends Python.
void sleep_if_unwound_at_the_end() {
  const bool is_unwound = abi::__cxa_current_exception_type() == nullptr;
  if (is_unwound && is_interpreter_ending() != 0 && !is_first_thread()) {
    for (;;) ::pause();
  }
  if (other_handler != nullptr) other_handler();
}

// A thread that was in a call of another library must sleep too, whoever started it; WithoutGil is not in that call.
void sleep_when_unwound() {
  if (std::get_terminate() == &sleep_if_unwound_at_the_end) return;
  // The limited API of Python 3.12 has neither name; 3.13 made the second one public under the first.
  for (const char* name : {"Py_IsFinalizing", "_Py_IsFinalizing"}) {
    if (void* found = ::dlsym(RTLD_DEFAULT, name); found != nullptr) {
      is_interpreter_ending = reinterpret_cast<int (*)()>(found);
      other_handler = std::set_terminate(&sleep_if_unwound_at_the_end);
      return;
    }
  }
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
  sleep_when_unwound();
  m.def(
      "end_without_mpi",
      [] {
        static std::atomic<bool> is_set{false};
        if (!is_set.exchange(true)) Py_AtExit(&watch_the_end);
      },
      "Make this process end even if MPI_Finalize, at the process's exit, waits for lost ranks.");
}

}  // namespace multiring
