"""The process from which ranks are forked. It imports all modules once, so that a rank costs only milliseconds.

    nursery          one for all workers of a test run; it imports numpy and multiring, but never initialises multiring
      supervisor     one for each job; it starts the ranks, injects the faults and ends all processes
        rank         runs the job's function and exits quickly, unless the test asks for a full interpreter exit

tests/support/ranks.py starts the nursery with a listening socket as standard input.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

import numpy as np
from tests.support.faults import Fault

import multiring

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_RANKS_PER_HOST = {"shm+tcp": 2, "mpi": 1, "shm+mpi": 2}


def host_of(engine: str, rank: int) -> int | None:
    """Return the number of a rank's host, by the name of the engine: "shm+tcp:3,1" has 3 ranks on the first host.

    None if the engine does not say it.
    """
    name, _, sizes = engine.partition(":")
    if sizes:
        return next(host for host, end in enumerate(accumulate(map(int, sizes.split(",")))) if rank < end)
    return rank // _RANKS_PER_HOST[name] if name in _RANKS_PER_HOST else None


_TRACEBACK_S = 0.5  # time for a hanging rank to print its traceback
_ALONE_S = 60.0  # the process that starts a nursery connects at once, if it lives


@dataclass(frozen=True, kw_only=True, slots=True)
class Home:
    """The interpreter, environment and imports of a nursery. Jobs share one if their homes differ in imports only.

    `name` is the framework's name if the nursery loads one.
    """

    name: str = ""
    python: str = ""  # default: this interpreter
    path: tuple[str, ...] = ()  # module search path; default: that of this process
    environment: tuple[tuple[str, str], ...] = ()
    imports: tuple[str, ...] = ()

    def environment_value(self, name: str) -> str:
        """Return the value of a variable that this home sets, or ""."""
        return dict(self.environment).get(name, "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A job to run."""

    module: str
    function: str
    arguments: tuple[Any, ...]
    ranks: int
    engine: str
    environments: tuple[dict[str, str], ...]  # by rank
    faults: tuple[Fault, ...]
    beforehand: tuple[str, ...]  # modules to import before ranks are forked
    ends_fully: bool  # run the interpreter's full finalization
    deadline_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The end of one rank: `value` is the result of its function, `error` its exception."""

    rank: int
    value: Any
    error: BaseException | None
    exit_code: int  # -n: ended by signal n
    stages: tuple[str, ...]
    ended_s: float  # since the job's start
    output: str
    hung: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The end of a job."""

    outcomes: tuple[Outcome, ...]
    fired_s: tuple[float | None, ...]  # by fault, in seconds since the job's start
    orphans: int  # processes that ranks left behind; the rig has killed them


@dataclass(slots=True)
class Here:
    """The interface of the rig to a rank's function."""

    rank: int
    size: int
    engine: str
    _report: Connection

    def join(self, **settings: Any) -> multiring.Group:
        """Initialise multiring and return the group of all ranks."""
        self.take_host()
        return multiring.init(**settings)

    def take_host(self) -> None:
        """Let this process be on the host that the engine's name gives to its rank."""
        if (host := host_of(self.engine, self.rank)) is not None:
            world = importlib.import_module("multiring._runtime.job.joining")
            vars(world)["host_id"] = lambda: f"host {host}"

    def reach(self, stage: str) -> None:
        """Tell the rig that this rank is at `stage`; faults for this stage then fire."""
        self._report.send(("stage", stage))


def serve(listener: socket.socket) -> None:
    """Fork a supervisor for each request of each test process. Return only in ranks, once their function has ended.

    The nursery ends when the last test process has closed its connection.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    doors: list[socket.socket] = []
    while ready := wait([listener, *doors], None if doors else _ALONE_S):
        for source in ready:
            assert isinstance(source, socket.socket)
            if source is listener:
                doors.append(listener.accept()[0])
                continue
            word, fds, _, _ = socket.recv_fds(source, 1, 1)
            if not word:
                source.close()
                doors.remove(source)
                if not doors:
                    os._exit(0)
                continue
            run = _begun(Connection(fds[0]), [listener, *doors])
            if run is not None:
                run()
                return
    os._exit(0)


def _begun(channel: Connection, doors: list[socket.socket]) -> Callable[[], None] | None:
    """Fork the supervisor of one job. Return None in the nursery, or a rank's function in the rank."""
    request: Request = channel.recv()
    try:
        job = _find(request)
    except Exception:  # noqa: BLE001 -- reported to the test that asked
        channel.send(traceback.format_exc())
        channel.close()
        return None
    _leave_to_the_nursery()
    if os.fork() == 0:
        for door in doors:
            door.close()
        run = _Supervisor(request, job, channel).run()
        if run is None:
            os._exit(0)
        return run
    channel.close()
    return None


def _leave_to_the_nursery() -> None:
    """Exempt existing objects from the ranks' garbage collection and finalizers, which would copy much memory."""
    gc.freeze()
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # there is no other way to them
        each.atexit = False


def _find(request: Request) -> Callable[..., Any]:
    for name in request.beforehand:
        importlib.import_module(name)
    found: Any = importlib.import_module(request.module)
    for name in request.function.split("."):
        found = getattr(found, name)
    job: Callable[..., Any] = found
    return job


@dataclass(slots=True)
class _Child:
    rank: int
    pid: int
    report: Connection
    output: IO[bytes]
    value: Any = None
    error: BaseException | None = None
    exit_code: int | None = None
    ended_s: float = 0.0
    stages: list[str] = field(default_factory=list)
    frozen: bool = False
    hung: bool = False


class _Supervisor:
    def __init__(self, request: Request, job: Callable[..., Any], channel: Connection) -> None:
        self._request = request
        self._job = job
        self._channel = channel
        self._children: list[_Child] = []
        self._fired: list[float | None] = [None] * len(request.faults)
        self._due: list[tuple[float, int]] = []  # (time, index of the fault)
        self._start = time.monotonic()

    def run(self) -> Callable[[], None] | None:
        """Return None in the supervisor once the job has ended, or a rank's function in the rank."""
        os.setsid()
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for rank in range(self._request.ranks):
            if self._is_absent(rank):
                continue
            run = self._fork(rank, libc)
            if run is not None:
                signal.set_wakeup_fd(-1)
                os.close(wake_read)
                os.close(wake_write)
                return run
        self._watch(wake_read)
        self._end_everyone()
        self._channel.send(self._outcome())
        return None

    def _is_absent(self, rank: int) -> bool:
        for index, fault in enumerate(self._request.faults):
            if fault.rank == rank and fault.number is None:
                self._fired[index] = 0.0
                return True
        return False

    def _fork(self, rank: int, libc: ctypes.CDLL) -> Callable[[], None] | None:
        ours, theirs = _pipe()
        output = tempfile.TemporaryFile()  # noqa: SIM115 -- closed with the supervisor
        pid = os.fork()
        if pid:
            theirs.close()
            self._children.append(_Child(rank, pid, ours, output))
            self._on_stage(self._children[-1], "started")
            return None
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for each in (ours, self._channel, *(child.report for child in self._children)):
            each.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        os.environ.update(self._request.environments[rank])
        here = Here(rank, self._request.ranks, self._request.engine, theirs)
        if self._request.ends_fully:
            gc.unfreeze()
        live = _live if self._request.ends_fully else _live_and_end_quickly
        return lambda: live(self._job, here, self._request.arguments)

    # -- while the job runs

    def _watch(self, wake_read: int) -> None:
        deadline = self._start + self._request.deadline_s
        while self._unfinished():
            now = time.monotonic()
            if now >= deadline:
                self._explain_hang()
                return
            self._fire(now)
            until = min([deadline, *(when for when, _ in self._due)])
            sources: list[Any] = [child.report for child in self._children if not child.report.closed]
            ready = wait([*sources, wake_read, self._channel], max(0.0, until - now))
            if self._channel in ready:  # the test process has ended
                return
            for child in self._children:
                if child.report in ready:
                    self._hear(child)
            if wake_read in ready:
                os.read(wake_read, 4096)
                self._reap()

    def _unfinished(self) -> bool:
        return any(child.exit_code is None and not child.frozen for child in self._children)

    def _hear(self, child: _Child) -> None:
        try:
            kind, *rest = child.report.recv()
        except (EOFError, ConnectionResetError, pickle.UnpicklingError):
            child.report.close()
            return
        if kind == "stage":
            child.stages.append(rest[0])
            self._on_stage(child, rest[0])
        elif kind == "value":
            child.value = rest[0]
        else:
            child.error = rest[0]

    def _on_stage(self, child: _Child, stage: str) -> None:
        for index, fault in enumerate(self._request.faults):
            if fault.rank == child.rank and fault.stage == stage and self._fired[index] is None:
                self._due.append((time.monotonic() + fault.delay_s, index))
        self._fire(time.monotonic())

    def _fire(self, now: float) -> None:
        for when, index in [due for due in self._due if due[0] <= now]:
            self._due.remove((when, index))
            fault = self._request.faults[index]
            for child in self._children:
                if child.rank == fault.rank and child.exit_code is None and fault.number is not None:
                    os.kill(child.pid, fault.number)
                    self._fired[index] = time.monotonic() - self._start
                    child.frozen |= fault.number is signal.SIGSTOP

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                for child in self._children:
                    if child.pid == pid:
                        child.exit_code = os.waitstatus_to_exitcode(status)
                        child.ended_s = time.monotonic() - self._start

    # -- afterwards

    def _explain_hang(self) -> None:
        for child in self._children:
            if child.exit_code is None and not child.frozen:
                child.hung = True
                os.kill(child.pid, signal.SIGUSR1)
        time.sleep(_TRACEBACK_S)

    def _end_everyone(self) -> None:
        running = [child for child in self._children if child.exit_code is None]
        for child in running:
            os.kill(child.pid, signal.SIGKILL)
        for child in self._children:
            if child in running:
                _, status = os.waitpid(child.pid, 0)
                child.exit_code = os.waitstatus_to_exitcode(status)
                child.ended_s = time.monotonic() - self._start
            while not child.report.closed and child.report.poll():
                self._hear(child)

    def _outcome(self) -> Report:
        orphans = _end_orphans()
        outcomes = []
        for child in self._children:
            child.output.seek(0)
            outcomes.append(
                Outcome(
                    rank=child.rank,
                    value=child.value,
                    error=child.error,
                    exit_code=child.exit_code or 0,
                    stages=tuple(child.stages),
                    ended_s=child.ended_s,
                    output=child.output.read().decode(errors="replace"),
                    hung=child.hung,
                )
            )
        return Report(outcomes=tuple(outcomes), fired_s=tuple(self._fired), orphans=orphans)


def _end_orphans() -> int:
    """Kill the orphans of the ranks, which this process has inherited; return their number."""
    found: set[int] = set()
    with contextlib.suppress(ChildProcessError):
        while True:
            for entry in Path("/proc").iterdir():
                if entry.name.isdecimal() and _parent_of(entry) == os.getpid():
                    found.add(int(entry.name))
                    os.kill(int(entry.name), signal.SIGKILL)
            os.waitpid(-1, 0)
    return len(found)


def _parent_of(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1


def _pipe() -> tuple[Connection, Connection]:
    read, write = os.pipe2(os.O_CLOEXEC)
    return Connection(read, writable=False), Connection(write, readable=False)


def _live(job: Callable[..., Any], here: Here, arguments: tuple[Any, ...]) -> None:
    try:
        value = job(here, *arguments)
    except BaseException as error:
        here._report.send(("error", _portable(error)))
        raise
    here._report.send(("value", value))


def _live_and_end_quickly(job: Callable[..., Any], here: Here, arguments: tuple[Any, ...]) -> None:
    """Run `_live`, but skip the teardown of modules, which copies their memory and takes longer than most jobs."""
    code = 0
    try:
        _live(job, here, arguments)
    except BaseException:  # noqa: BLE001 -- what the interpreter does with it
        code = 1
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]  # what the interpreter calls at its end
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(code)


def _portable(error: BaseException) -> BaseException:
    try:
        copy = pickle.loads(pickle.dumps(error))  # noqa: S301 -- our own
    except Exception:  # noqa: BLE001 -- an error that cannot be pickled must still be told
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error if isinstance(copy, type(error)) else RuntimeError(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    np.zeros(1)  # numpy is imported for the ranks only
    # Classes of module `__main__` differ from the classes that the tests unpickle.
    from tests.support import nursery

    listening = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 -- ranks must not hold the socket open
        os.dup2(nothing.fileno(), 0)
    nursery.serve(listening)
