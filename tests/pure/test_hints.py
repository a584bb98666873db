"""What the launcher says about causes that last lines do not explain."""

import subprocess
import sys

import pytest

from multiring._launch.hints import hints_for


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"ModuleNotFoundError: No module named 'horovod'", "--horovod lets a program"),
        (b"ModuleNotFoundError: No module named 'multiring'", "this program's Python is not multiring's"),
        (b"multiring.errors.StateError: memfd_create: Operation not permitted (errno 1)", "seccomp profile forbids"),
        (
            b"RuntimeError: unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)",
            "--shm-size",
        ),
        (b"RuntimeError: Resource temporarily unavailable", "--pids-limit"),
        (b"RuntimeError: can't start new thread", "--pids-limit"),
    ],
)
def test_a_cause_is_explained_once(line: bytes, words: str) -> None:
    [hint] = hints_for([b"Traceback", line, line])
    assert words in hint


def test_other_lines_have_no_hint() -> None:
    # A socket that would block has the same words.
    assert hints_for([b"zmq.error.Again: Resource temporarily unavailable", b"ValueError: x"]) == []


def test_a_limit_of_processes_has_these_words() -> None:
    program = (
        "import os, resource, threading\n"
        "resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))\n"
        "os.getuid() or os.setuid(65534)\n"
        "{}\n"
    )
    for act in ("os.fork()", "threading.Thread(target=print).start()"):
        done = subprocess.run(
            [sys.executable, "-c", program.format(act)], capture_output=True, timeout=240, check=False
        )
        assert done.returncode == 1
        [hint] = hints_for(done.stderr.splitlines())
        assert "the limit of processes is used up" in hint
