"""The rig by which wire tests run ranks: n processes of one function, with a deadline; it reports every error."""

import atexit
import fcntl
import hashlib
import itertools
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support import device_use
from tests.support.faults import Fault
from tests.support.mpi_ranks import run_by_mpiexec
from tests.support.nursery import Here, Home, Outcome, Report, Request

from multiring._settings import environment_of

DEADLINE_S = 240.0  # it ends a job that hangs; the longest jobs take a minute on a machine with much other work
ENGINES = ("shm", "tcp", "shm+tcp")
ENGINE = os.environ.get("MULTIRING_TEST_ENGINE", "shm")  # of tests that name none
MPI_ENGINES = ("mpi", "shm+mpi")  # only for run_ranks
CONFORMING = (*ENGINES, "mpi")  # engines of the conformance suite
FRAMEWORKS = ("torch", "jax", "keras", "tf")  # names under which tests import them
# Modules that a framework imports on first use. They take seconds of a core, so the nursery imports them once.
USED_FIRST = {"torch": ("torch._dynamo",)}
SECRET = "wire tests"  # noqa: S105 -- of jobs that live for a second

_jobs = itertools.count()


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """Options for the start and the end of ranks."""

    nursery: str = ""  # a framework; default: the framework that the function's module imports
    beforehand: tuple[str, ...] = ()  # modules that the nursery imports, so that no rank has to
    # Run the interpreter's full finalization, as any Python process does, instead of ending right after the exit
    # functions. It is for tests of that phase, and costs 50 ms of a core for each rank (220 ms with torch).
    ends_fully: bool = False


class RanksFailed(AssertionError):  # noqa: N818 -- several errors
    """Some ranks raised, hung or died unexpectedly. The text has each rank's error and output."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        super().__init__(f"{len(outcomes)} ranks failed\n" + "\n".join(map(_shown, outcomes)))


def run_ranks(
    function: Callable[..., Any], ranks: int, *arguments: Any, engine: str = ENGINE, **options: Any
) -> list[Any]:
    """Return the result of `function(here, *arguments)` on each rank; see `report_of` for the options.

    With MPI, `engine` is "mpi" (one rank a host) or "shm+mpi" (two ranks a host), and the option `mpi` selects the
    implementation. Of the other options, only the deadline and the settings apply. Each rank ends fully.

    Raises:
        RanksFailed: a rank raised or did not end.
        AssertionError: a process was left behind.
    """
    if engine in MPI_ENGINES:
        options.pop("process", None)
        return run_by_mpiexec(function, ranks, *arguments, engine=engine, **{"deadline_s": DEADLINE_S, **options})
    report = report_of(function, ranks, *arguments, engine=engine, **options)
    failed = [each for each in report.outcomes if each.error or each.exit_code or each.hung]
    if failed:
        raise RanksFailed(failed)
    assert report.orphans == 0, f"{report.orphans} processes were left behind"
    return [outcome.value for outcome in report.outcomes]


def report_of(  # noqa: PLR0913 -- all but two by name
    function: Callable[..., Any],
    ranks: int,
    *arguments: Any,
    engine: str = ENGINE,
    faults: Sequence[Fault] = (),
    deadline_s: float = DEADLINE_S,
    by_rank: Sequence[dict[str, Any]] | None = None,
    process: Process = Process(),
    **settings: Any,
) -> Report:
    """Run `function(here, *arguments)` on each rank and report the end of each, failed or not.

    Args:
        function: a top-level function of a module; ranks import it by name.
        ranks: the number of ranks.
        arguments: arguments of the function.
        engine: "shm", "tcp" (one rank a host) or "shm+tcp" (two ranks a host).
        faults: faults of ranks; the test fails if one never fires.
        deadline_s: a rank that runs longer is killed and counts as hung.
        by_rank: settings of single ranks.
        process: options for the start and the end of ranks.
        settings: fields of `Settings` for all ranks. `home` selects another interpreter than this one.

    Raises:
        RanksFailed: a rank hung.
    """
    # A loaded framework makes forks expensive, so only tests of that framework use its nursery.
    named = (each for each in FRAMEWORKS if each in vars(sys.modules[function.__module__]))
    name = process.nursery or next(named, "")
    home: Home = settings.pop("home", None) or Home(name=name, imports=USED_FIRST.get(name, ()))
    place = f"@multiring-test-{os.getpid()}-{next(_jobs)}"
    common = {"size": ranks, "rendezvous": place, "secret": SECRET, "job": place[1:], **settings}
    common["engine"] = "tcp" if engine == "tcp" else "auto"
    own = by_rank or [{}] * ranks
    request = Request(
        module=function.__module__,
        function=function.__qualname__,
        arguments=arguments,
        ranks=ranks,
        engine=engine,
        environments=tuple(environment_of(**{"rank": rank, **common, **own[rank]}) for rank in range(ranks)),
        faults=tuple(faults),
        beforehand=(*home.imports, *process.beforehand),
        ends_fully=process.ends_fully,
        deadline_s=deadline_s,
    )
    if device_use.is_on and home.name == "torch" and not home.python:
        request = _on_devices(request)
    report = _nursery(_settled(home)).run(request)
    if device_use.is_on:
        report = device_use.noted(report)
    hung = [outcome for outcome in report.outcomes if outcome.hung]
    if hung:
        raise RanksFailed(hung)
    for fault, fired_s in zip(faults, report.fired_s, strict=True):
        assert fired_s is not None, f"{fault} never happened; stages: {[each.stages for each in report.outcomes]}"
    return report


def _on_devices(request: Request) -> Request:
    """Return the request with the tensors of the function on stand-in devices; see default_device.py."""
    runner = "tests.support.default_device"
    if request.module == "tests.support.cuda_torch_ranks":
        return request
    arguments = (request.module, request.function, request.arguments)
    beforehand = (*request.beforehand, runner, request.module)
    return replace(request, module=runner, function="run", arguments=arguments, beforehand=beforehand)


class _Nursery:
    """The process from which supervisors are forked, and through them ranks.

    All workers of pytest-xdist share it, because the import of a framework takes up to 15 seconds of a core. The
    worker that needs it first starts it, and it ends once all workers have ended.
    """

    def __init__(self, home: Home) -> None:
        self._shared = "xdist" in sys.modules and "PYTEST_XDIST_TESTRUNUID" in os.environ
        run = os.environ["PYTEST_XDIST_TESTRUNUID"] if self._shared else f"{os.getpid()}"
        key = hashlib.blake2b(repr((run, home, sys.path)).encode(), digest_size=12).hexdigest()
        self._place = f"\0multiring-nursery-{key}"
        self._process: subprocess.Popen[bytes] | None = None
        with (Path(tempfile.gettempdir()) / f"multiring-nurseries-{os.getuid()}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                self._door = self._entered()
            except ConnectionRefusedError:
                self._process = self._started(home)
                self._door = self._entered()
        atexit.register(self.close)

    def _entered(self) -> socket.socket:
        door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            door.connect(self._place)
        except BaseException:
            door.close()
            raise
        return door

    def _started(self, home: Home) -> subprocess.Popen[bytes]:
        environment = {name: text for name, text in os.environ.items() if not name.startswith("MULTIRING_")}
        environment["PYTHONPATH"] = os.pathsep.join(home.path or sys.path)
        environment["OPENBLAS_NUM_THREADS"] = environment["OMP_NUM_THREADS"] = "1"
        environment |= dict(home.environment)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(self._place)
            listener.listen()
            return subprocess.Popen(
                [home.python or sys.executable, "-m", "tests.support.nursery"],
                cwd=Path(__file__).parents[2],
                env=environment,
                stdin=listener.fileno(),
                start_new_session=True,
            )

    def run(self, request: Request) -> Report:
        ours, theirs = socket.socketpair()
        with Connection(ours.detach()) as channel:
            with theirs:
                socket.send_fds(self._door, [b"j"], [theirs.fileno()])
            channel.send(request)
            if not channel.poll(request.deadline_s + 60):
                raise AssertionError("the supervisor of the ranks hangs")
            answer = channel.recv()
        assert isinstance(answer, Report), answer
        return answer

    def close(self) -> None:
        self._door.close()
        if self._process and not self._shared:
            self._process.wait(240)


def _settled(home: Home) -> Home:
    """Return the home of a nursery: without the imports, which each request brings, and with its whole environment."""
    named = {name: os.environ[name] for name in ("KERAS_BACKEND", "TF_CPP_MIN_LOG_LEVEL") if name in os.environ}
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3"} | named | dict(home.environment)
    return replace(home, imports=(), environment=tuple(sorted(environment.items())))


_nursery = cache(_Nursery)


def _shown(outcome: Outcome) -> str:
    how = "hung" if outcome.hung else f"exit code {outcome.exit_code}"
    error = "" if outcome.error is None else f", {type(outcome.error).__name__}: {outcome.error}"
    return f"--- rank {outcome.rank}: {how}{error}; stages {outcome.stages}\n{outcome.output[-4000:]}"


__all__ = [
    "CONFORMING",
    "DEADLINE_S",
    "ENGINES",
    "MPI_ENGINES",
    "USED_FIRST",
    "Here",
    "Home",
    "Outcome",
    "Process",
    "RanksFailed",
    "Report",
    "report_of",
    "run_ranks",
]
