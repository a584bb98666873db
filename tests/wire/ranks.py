"""The one way wire tests run ranks: n processes of a function, with a deadline; nobody's error is lost."""

import atexit
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.wire.faults import Fault
from tests.wire.mpi_ranks import run_by_mpiexec
from tests.wire.nursery import Here, Home, Outcome, Report, Request

from multiring.settings import environment_of

DEADLINE_S = 60.0  # ten times what anything here takes on a loaded machine
ENGINES = ("shm", "tcp", "shm+tcp")
MPI_ENGINES = ("mpi", "shm+mpi")  # run_ranks only
CONFORMING = (*ENGINES, "mpi")  # what the conformance suite runs on
FRAMEWORKS = ("torch", "jax", "keras", "tf")  # as tests call them
# What a framework imports when it is used first, seconds of a core: once in its nursery, and not in every rank.
USED_FIRST = {"torch": ("torch._dynamo",)}
SECRET = "wire tests"  # noqa: S105 -- of jobs that live for a second

_jobs = itertools.count()


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """How ranks begin and end."""

    nursery: str = ""  # of this framework; else of the one that the function's module names
    beforehand: tuple[str, ...] = ()  # modules that the nursery imports, so that no rank has to
    # As any Python process does, modules and all, in place of at once after its exit functions: for what may go wrong
    # there. That costs 50 ms of a core for each rank, with torch 220.
    ends_fully: bool = False


class RanksFailed(AssertionError):  # noqa: N818 -- several errors
    """Ranks raised, hung or died that should not have: all of them, each with what it wrote."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        super().__init__(f"{len(outcomes)} ranks failed\n" + "\n".join(map(_shown, outcomes)))


def run_ranks(
    function: Callable[..., Any], ranks: int, *arguments: Any, engine: str = "shm", **options: Any
) -> list[Any]:
    """Return what `function(here, *arguments)` returns on each rank; see `report_of` for the options.

    By MPI, `engine` is "mpi" for every rank being a host of its own or "shm+mpi" for two ranks a host, and the option
    `mpi` says which one. Of the other options there are then the deadline and the settings; each rank ends fully.

    Raises:
        RanksFailed: on any rank it raised, or did not end; or a process was left behind.
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
    engine: str = "shm",
    faults: Sequence[Fault] = (),
    deadline_s: float = DEADLINE_S,
    by_rank: Sequence[dict[str, Any]] | None = None,
    process: Process = Process(),
    **settings: Any,
) -> Report:
    """Run `function(here, *arguments)` on each rank and return how all of them ended, whatever that was.

    Args:
        function: of a module's top level; ranks import it by name.
        ranks: how many.
        arguments: for the function.
        engine: "shm", "tcp" for every rank being a host of its own, or "shm+tcp" for two ranks a host.
        faults: what happens to ranks; the test fails if one of them does not.
        deadline_s: a rank that has not ended by then is killed and counted as hung.
        by_rank: settings of single ranks.
        process: how ranks begin and end.
        settings: fields of `Settings` for all ranks; and `home`, where they are at home, if not in an interpreter
            like this one.

    Raises:
        RanksFailed: a rank hung.
    """
    # With a framework loaded a fork costs a lot, which only tests of that one are to pay.
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
        home=home,
        beforehand=process.beforehand,
        ends_fully=process.ends_fully,
        deadline_s=deadline_s,
    )
    report = _nursery(home, os.environ.get("KERAS_BACKEND", "")).run(request)
    hung = [outcome for outcome in report.outcomes if outcome.hung]
    if hung:
        raise RanksFailed(hung)
    for fault, fired_s in zip(faults, report.fired_s, strict=True):
        assert fired_s is not None, f"{fault} never happened; stages: {[each.stages for each in report.outcomes]}"
    return report


class _Nursery:
    """The process that supervisors, and through them ranks, are forked from."""

    def __init__(self, home: Home) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {name: text for name, text in os.environ.items() if not name.startswith("MULTIRING_")}
        environment["PYTHONPATH"] = os.pathsep.join(home.path or sys.path)
        environment["OPENBLAS_NUM_THREADS"] = environment["OMP_NUM_THREADS"] = "1"
        environment |= dict(home.environment)
        self._process = subprocess.Popen(
            [home.python or sys.executable, "-m", "tests.wire.nursery"],
            cwd=Path(__file__).parents[2],
            env=environment,
            stdin=theirs.fileno(),
            start_new_session=True,
        )
        theirs.close()
        self._door = ours
        atexit.register(self.close)

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
        self._process.wait(10)


@cache
def _nursery(home: Home, keras_backend: str) -> _Nursery:  # noqa: ARG001 -- a key
    return _Nursery(home)


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
