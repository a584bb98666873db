"""A kernel that refuses a process or thread is an error with the limits and what to do, in bounded time."""

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from multiring._exchanges import munge
from multiring._exchanges.background_call import BackgroundCall
from multiring._limits.processes import limits_told
from multiring.errors import LaunchError

# Root has no limit of processes. The other user may read all files, because Python may be in root's home.
_MAY_READ = "-all,+dac_override,+dac_read_search"
AS_USER = ("--clear-groups", f"--inh-caps={_MAY_READ}", f"--ambient-caps={_MAY_READ}")
FUNCTION = "import multiring; multiring.run(int, 2)"


def limited(processes: int, *command: str) -> "subprocess.CompletedProcess[str]":
    """Run a command of a user who may have so many processes and threads."""
    user = 200_000 + os.getpid()  # whom no other test uses at the same time
    become = ["setpriv", f"--reuid={user}", *AS_USER] if os.geteuid() == 0 else []
    words = ["prlimit", f"--nproc={processes}", *become, *command]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, capture_output=True, text=True, timeout=240, check=False, env=environment)


needs_users = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="starts a process of another user"
)


def test_a_refused_thread_is_an_error_that_names_the_limits() -> None:
    done = limited(1, sys.executable, "-c", "import multiring; multiring.init()")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("multiring.errors.LaunchError: rank 0 cannot start a thread (Resource temporarily unavail")
    assert "`ulimit -u` is 1" in last


@needs_users
@pytest.mark.parametrize(
    ("processes", "words", "told"),
    [
        (1, ("-m", "multiring", "run", "-n", "2", "/bin/true"), "the launcher's watchdog cannot be started"),
        (2, ("-m", "multiring", "run", "-n", "2", "/bin/true"), "started 0 of 2 ranks, then: Resource temporarily"),
        (3, ("-m", "multiring", "run", "-n", "2", "/bin/true"), "started 1 of 2 ranks, then: Resource temporarily"),
        (1, ("-c", FUNCTION), "LaunchError: the launcher cannot be started"),
    ],
)
def test_a_launcher_that_can_start_no_process_names_the_limits(
    processes: int, words: tuple[str, ...], told: str
) -> None:
    done = limited(processes, sys.executable, *words)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == (1 if "-c" in words else 2), done.stderr
    assert told in last
    assert f"`ulimit -u` is {processes}" in last


def test_sessions_that_cannot_be_started_name_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    from multiring._launch import host_sessions  # noqa: PLC0415 -- used by this test only

    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("subprocess.Popen", refuse)
    session = host_sessions.HostSession("a", 0, 1)
    for program, begin in (
        ("the agent of this host", session.open_here),
        ("ssh", lambda: session.open_by(["ssh", "a"])),
        ("srun", lambda: host_sessions.open_step(["srun"], {}, b"")),
    ):
        with pytest.raises(LaunchError, match=rf"^{program} cannot be started \(Resource .*\): this user or container"):
            begin()


def refuse_threads(monkeypatch: pytest.MonkeyPatch, most: int = 1) -> list[threading.Thread]:
    """Refuse the next `most` threads, and return them."""
    refused: list[threading.Thread] = []
    start = threading.Thread.start

    def refusing(thread: threading.Thread) -> None:
        if len(refused) < most:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refusing)
    return refused


def test_a_thread_of_an_exchange_that_is_refused_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_threads(monkeypatch)
    with pytest.raises(LaunchError, match=r"this rank cannot start a thread.*this user or container may have no more"):
        BackgroundCall(int)


def test_munges_server_goes_on_when_a_thread_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of the server would end silently, and the ranks would wait for rank 0 until their time is up."""
    monkeypatch.setattr(munge, "_decode", lambda data: data)
    monkeypatch.setattr(munge, "_encode", lambda data: data)
    listener = socket.create_server(("127.0.0.1", 0))
    server = threading.Thread(target=munge._serve, args=(listener, "step", "where"), daemon=True)
    server.start()
    refused = refuse_threads(monkeypatch)
    answers = []
    for _ in range(2):
        with socket.create_connection(listener.getsockname(), timeout=240) as talk:
            try:
                talk.sendall(b'{"step": "step", "number": 1}')
                talk.shutdown(socket.SHUT_WR)
                answers.append(talk.recv(1000))
            except OSError:
                answers.append(b"")
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    server.join(240)
    assert not server.is_alive()
    assert len(refused) == 1
    assert answers[0] == b""
    assert b"where" in answers[1]


def test_the_limits_of_control_groups_are_told(tmp_path: Path) -> None:
    own = tmp_path / "job" / "step"
    own.mkdir(parents=True)
    (own / "pids.max").write_text("max\n")
    (own.parent / "pids.max").write_text("50\n")
    (own.parent / "pids.current").write_text("50\n")
    told = limits_told("0::/job/step\n", tmp_path)
    assert f"pids.max of {own.parent} is 50, of which 50 are used" in told
    assert str(own) + " " not in told
    began = time.monotonic()
    assert "may have no more processes and threads" in limits_told("", tmp_path)
    assert time.monotonic() - began < 60
