"""A process exits as its program does, whatever its threads are doing."""

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import threading
import numpy as np
import multiring

world = multiring.init()
context = world.calls.services.context

def look():
    while True:
        context.has_failed()  # without the GIL, and back

for _ in range(30):
    threading.Thread(target=look, daemon=True).start()
world.all_reduce(np.ones(10))
print("done")
"""


def test_threads_that_come_back_while_the_interpreter_ends_do_not_abort_the_process() -> None:
    # Without the fix, five of eight processes ended by SIGABRT, "terminate called without an active exception".
    for _ in range(8):
        done = _run(PROGRAM)
        assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


IN_A_LIBRARY = """
import sys, threading
import torch
import multiring.torch

first, second = torch.ones(1 << 14), torch.zeros(1 << 14)
inside = [threading.Event() for _ in range(3)]

def copy(event):
    while True:
        first.copy_(second)  # torch releases the GIL, and takes it back in a destructor
        event.set()

for event in inside:
    threading.Thread(target=copy, args=(event,), daemon=True).start()
    event.wait()
print("done", flush=True)
if sys.argv[1] == "exception":
    raise RuntimeError("of the program")
if sys.argv[1] == "sys.exit":
    sys.exit(3)
"""


@pytest.mark.parametrize(("way", "code"), [("end", 0), ("exception", 1), ("sys.exit", 3)])
def test_threads_in_a_call_of_torch_do_not_abort_the_process(way: str, code: int) -> None:
    # Without the fix, six of six processes aborted. multiring's own threads copy tensors, and users' threads load them.
    for _ in range(2):
        done = _run(IN_A_LIBRARY, way)
        assert (done.returncode, done.stdout) == (code, "done\n"), done.stderr
        assert ("of the program" in done.stderr) == (way == "exception"), done.stderr


OWN_FAULT = """
import ctypes
import multiring._native
ctypes.CDLL("libstdc++.so.6")["_ZSt9terminatev"]()
"""


def test_a_fault_of_the_program_still_aborts() -> None:
    assert _run(OWN_FAULT).returncode == -signal.SIGABRT


SIGNALLED_LATE = """
import os, signal, sys
import multiring

class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), numbers=(signal.SIGUSR1, signal.SIGTERM)):
        for number in numbers:  # the interpreter no longer calls handlers
            kill(pid, number)

if sys.argv[1] == "handled":
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, frame: None)
late = Late()
multiring.init()
print("done", flush=True)
"""


@pytest.mark.parametrize(("way", "code"), [("handled", 0), ("default", -signal.SIGUSR1)])
def test_a_handled_signal_does_not_kill_a_program_that_has_ended(way: str, code: int) -> None:
    done = _run(SIGNALLED_LATE, way)
    assert (done.returncode, done.stdout) == (code, "done\n"), done.stderr


def _run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=240, check=False
    )
