"""Run a command as N ranks on this machine: one thread, one loop, nothing left behind.

The life of a job: running -> (a rank failed) settling -> stopping -> over. Settling exists because a rank that
dies slowly, say while its interpreter shuts down, is overtaken by the ranks that miss it and raise PeerLostError:
their failure is a consequence, and the cause gets a moment to come forward.
"""

import contextlib
import ctypes
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, cast

from multiring.errors import ArgumentError, LaunchError, PeerLostError, RendezvousError, StateError, UnsupportedError
from multiring.launch.cores import cores_of_cpus, share_cpus, thread_variables, threads_per_rank, usable_cpus
from multiring.launch.guard import Guard
from multiring.launch.leftovers import end_leftovers, job_processes, signal_group, signal_processes
from multiring.launch.output import Outlet, RankStream
from multiring.launch.signals import StopSignals
from multiring.settings import Settings, environment_of, inherited_environment

_SETTLE_S = 1.0
_GRACE_S = 2.0  # from asking the ranks to stop to killing them
_LEAST_GRACE_S = 0.3  # what processes found last are given
_PR_SET_PDEATHSIG = 1
_CONSEQUENCES = tuple(f"{kind.__module__}.{kind.__qualname__}".encode() for kind in (PeerLostError, RendezvousError))
_BROKEN_PIPE_CODE = 128 + signal.SIGPIPE


class CommandError(LaunchError):
    """The command cannot be run; `exit_code` is what a shell would return: 127 not found, 126 not executable."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def run_local(command: Sequence[str], ranks: int, *, log_dir: Path | None = None) -> int:
    """Run `command` as `ranks` local ranks and return the job's exit code.

    0 only where every rank ended with 0; else the code of the rank that failed first, 128 + n where it died of
    signal n. SIGINT, SIGTERM and SIGHUP are forwarded, and the code is 128 + n. Blocks until every process of the
    job is gone. Writes to file descriptors 1 and 2, and untagged to rank-K.out and rank-K.err in `log_dir`.
    Call it from the main thread.

    Raises:
        ArgumentError: no command, less than one rank, or a MULTIRING variable that makes no sense.
        CommandError: the command does not exist or cannot be executed.
        LaunchError: the system refuses so many processes, or `log_dir` cannot be written.
        UnsupportedError: this is not Linux.
        StateError: not called from the main thread.
    """
    if not sys.platform.startswith("linux"):
        raise UnsupportedError(f"multiring run works on Linux only, this is {sys.platform}")
    if threading.current_thread() is not threading.main_thread():
        raise StateError("run_local must be called from the main thread: it handles signals")
    if ranks < 1:
        raise ArgumentError(f"cannot run {ranks} ranks, want at least 1")
    if not command:
        raise ArgumentError("no command to run")
    environment = inherited_environment()
    _check_command(command[0], environment)
    token = secrets.token_hex(8)
    outer = Settings.from_environment(environment).job
    # A job started inside another's rank carries its name too, so that whoever ends the outer one finds it.
    plan = _Plan(
        command=tuple(command),
        ranks=ranks,
        job=f"{outer}/{token}" if outer else token,
        rendezvous=f"@multiring-{token}",
        secret=secrets.token_hex(32),
        environment=environment,
        log_dir=log_dir,
    )
    return _Job(plan).run()


def _check_command(program: str, environment: Mapping[str, str]) -> None:
    path = environment.get("PATH", os.defpath)
    if shutil.which(program, path=path) is not None:
        return
    if shutil.which(program, mode=os.F_OK, path=path) is None and not Path(program).is_dir():
        where = "" if "/" in program else f" on PATH ({path})"
        raise CommandError(f"command not found: {program!r}{where}", 127)
    raise CommandError(f"cannot execute {program!r}: it is a directory, or not executable by this user", 126)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """What to start."""

    command: tuple[str, ...]
    ranks: int
    job: str
    rendezvous: str
    secret: str
    environment: dict[str, str]
    log_dir: Path | None

    def environment_of_rank(self, rank: int, threads: int) -> dict[str, str]:
        environment = {"PYTHONUNBUFFERED": "1", **self.environment, **thread_variables(self.environment, threads)}
        for name in environment_of(secret_file=""):
            environment.pop(name, None)  # an outer job's; this one's secret is given in full
        return environment | environment_of(
            rank=rank,
            size=self.ranks,
            local_rank=rank,
            local_size=self.ranks,
            rendezvous=self.rendezvous,
            secret=self.secret,
            job=self.job,
        )


@dataclass(slots=True, eq=False)
class _Rank:
    """A started rank. `code` is None while it runs, then its exit code, or -n where it died of signal n."""

    number: int
    process: "subprocess.Popen[bytes]"
    out: RankStream
    err: RankStream
    code: int | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def has_failed(self) -> bool:
        return self.code not in (None, 0)

    @property
    def is_consequence(self) -> bool:
        """Whether it failed because it lost another rank, by its own last words."""
        return self.has_failed and any(line.startswith(_CONSEQUENCES) for line in self.err.last_lines)

    @property
    def exit_code(self) -> int:
        """What a shell would say: 128 + n for signal n."""
        code = self.code or 0
        return code if code >= 0 else 128 - code

    @property
    def ending(self) -> str:
        if self.code is None:
            return "is running"
        if self.code >= 0:
            return f"exit code {self.code}"
        try:
            return f"killed by {signal.Signals(-self.code).name}"
        except ValueError:
            return f"killed by signal {-self.code}"


class _Job:
    """The loop and its state."""

    def __init__(self, plan: _Plan) -> None:
        self._plan = plan
        self._out, self._err = Outlet(1), Outlet(2)
        self._ranks: list[_Rank] = []
        self._failed: list[_Rank] = []  # in the order found
        self._settle_until: float | None = None
        self._kill_at: float | None = None  # set once the job is being stopped
        self._killed = False
        self._code: int | None = None  # decided by the first failure or signal

    def run(self) -> int:
        with contextlib.ExitStack() as stack:
            self._signals = stack.enter_context(StopSignals())
            self._guard = Guard(self._plan.job)
            stack.callback(self._guard.dismiss)
            # However this ends, and also by a bug of ours: first the ranks, then the guard.
            stack.callback(self._end_everyone)
            try:
                self._start_all()
            except OSError as error:
                raise self._start_error(error) from None
            while self._running():
                self._turn()
            self._end_everyone()
            self._write_all()
        return self._code or 0

    # -- starting

    def _start_all(self) -> None:
        core_of = cores_of_cpus(usable_cpus())
        threads = threads_per_rank(core_of, self._plan.ranks)
        prepare_process = _death_with_parent()
        for number, cpus in enumerate(share_cpus(core_of, self._plan.ranks)):
            self._ranks.append(self._start(number, cpus, threads, prepare_process))
            self._guard.watch(self._ranks[-1].pid)

    def _start(self, number: int, cpus: frozenset[int], threads: int, die_with_us: Callable[[], None]) -> _Rank:
        logs = [self._open_log(number, kind) for kind in ("out", "err")]

        def prepare() -> None:  # runs in the child between fork and exec
            die_with_us()
            os.sched_setaffinity(0, cpus)

        process = subprocess.Popen(  # noqa: S603 -- running the user's command is what this is for
            self._plan.command,
            bufsize=0,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self._plan.environment_of_rank(number, threads),
            start_new_session=True,  # a group of its own, with what it will start
            preexec_fn=prepare,  # noqa: PLW1509 -- this process has one thread
        )
        tag = f"[{number}] ".encode()
        # Both are pipes, as asked for above.
        out = RankStream(cast("IO[bytes]", process.stdout), tag, self._out, logs[0])
        err = RankStream(cast("IO[bytes]", process.stderr), tag, self._err, logs[1])
        return _Rank(number, process, out, err)

    def _open_log(self, number: int, kind: str) -> BinaryIO | None:
        if self._plan.log_dir is None:
            return None
        path = self._plan.log_dir / f"rank-{number}.{kind}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return path.open("wb", buffering=0)
        except OSError as error:
            raise LaunchError(f"cannot write {path}: {error.strerror}") from None

    def _start_error(self, error: OSError) -> LaunchError:
        program = self._plan.command[0]
        if isinstance(error, FileNotFoundError):
            return CommandError(f"cannot execute {program!r}: its interpreter does not exist", 127)
        if isinstance(error, (PermissionError, IsADirectoryError)) or "Exec format" in str(error):
            return CommandError(f"cannot execute {program!r}: {error.strerror}", 126)
        return LaunchError(f"started {len(self._ranks)} of {self._plan.ranks} ranks, then: {error.strerror}")

    # -- one turn of the loop

    def _running(self) -> list[_Rank]:
        return [rank for rank in self._ranks if rank.code is None]

    def _turn(self) -> None:
        self._poll(self._next_wake())
        self._reap()
        self._watch_outlets()
        for number in self._signals.take():
            self._on_signal(number)
        now = time.monotonic()
        if self._settle_until is not None and self._kill_at is None and now >= self._settle_until:
            self._stop_because_of(self._failed[0])
        if self._kill_at is not None and now >= self._kill_at and not self._killed:
            self._kill()

    def _next_wake(self) -> float | None:
        if self._kill_at is not None:
            return None if self._killed else self._kill_at
        return self._settle_until

    def _poll(self, wake: float | None) -> None:
        """Move what can be moved, and return at the latest when `wake`, by the monotonic clock, has come."""
        with selectors.PollSelector() as poll:
            poll.register(self._signals.descriptor, selectors.EVENT_READ, self._signals.clear)
            for outlet in (self._out, self._err):
                if not outlet.is_empty:
                    poll.register(outlet.descriptor, selectors.EVENT_WRITE, outlet.write_some)
            for rank in self._ranks:
                for stream in (rank.out, rank.err):
                    if stream.is_open and not stream.outlet.is_full:
                        poll.register(stream.descriptor, selectors.EVENT_READ, stream.read_some)
            for key, _ in poll.select(None if wake is None else max(0.0, wake - time.monotonic())):
                key.data()

    def _watch_outlets(self) -> None:
        for rank in self._ranks:
            for stream in (rank.out, rank.err):
                if stream.log_failure is not None:
                    self._say(f"rank {rank.number}'s log is cut off: {stream.log_failure.strerror}")
                    stream.log_failure = None
        failure, self._out.failure_to_report = self._out.failure_to_report, None
        if isinstance(failure, BrokenPipeError):
            self._say("nobody reads the output any more")
            if self._kill_at is None:
                self._stop(_BROKEN_PIPE_CODE)
        elif failure is not None:
            self._say(f"the ranks' output is cut off: {failure.strerror}")

    # -- ranks that end

    def _reap(self) -> None:
        for rank in self._running():
            pid, status = os.waitpid(rank.pid, os.WNOHANG)
            if pid == 0:
                continue
            rank.code = rank.process.returncode = os.waitstatus_to_exitcode(status)
            self._guard.forget(rank.pid)
            rank.out.drain()
            rank.err.drain()
            if rank.has_failed:
                self._failed.append(rank)
        if self._failed and self._code is None:
            self._judge()

    def _judge(self) -> None:
        cause = next((rank for rank in self._failed if not rank.is_consequence), None)
        if cause is not None:
            self._stop_because_of(cause)
        elif not self._running():
            self._stop_because_of(self._failed[0])
        elif self._settle_until is None:
            self._settle_until = time.monotonic() + _SETTLE_S

    def _stop_because_of(self, cause: _Rank) -> None:
        self._say(f"rank {cause.number} (pid {cause.pid}) failed: {cause.ending}")
        lines = cause.err.last_lines
        self._say("its last lines on stderr:" if lines else "it wrote nothing on stderr")
        self._err.add(b"".join(b"    " + line + b"\n" for line in lines))
        for rank in self._ranks:
            if rank.code == 0:
                self._say(f"rank {rank.number} had ended normally (exit code 0) before that")
            elif rank.has_failed and rank is not cause:
                self._say(f"rank {rank.number} failed too: {rank.ending}")
        self._stop(cause.exit_code)

    # -- stopping the others

    def _on_signal(self, number: int) -> None:
        if self._kill_at is not None:
            self._kill_at = time.monotonic()  # asked twice
            return
        self._say(f"{signal.Signals(number).name} received")
        self._stop(128 + number, number)

    def _stop(self, code: int, number: int = signal.SIGTERM) -> None:
        self._code = code
        self._kill_at = time.monotonic() + _GRACE_S
        running = self._running()
        if running:
            self._say(f"stopping {_ranks_text(running)}")
        for rank in running:
            signal_group(rank.pid, number)
            signal_group(rank.pid, signal.SIGCONT)  # a stopped process hears nothing
        alone = set(job_processes(self._plan.job)) - {rank.pid for rank in running}
        signal_processes(alone, signal.SIGTERM)

    def _kill(self) -> None:
        self._killed = True
        running = self._running()
        if running:
            self._say(f"killing {_ranks_text(running)}, which did not stop")
        for rank in running:
            signal_group(rank.pid, signal.SIGKILL)

    def _end_everyone(self) -> None:
        """Leave no process of the job, whatever state it is in."""
        for rank in self._running():
            signal_group(rank.pid, signal.SIGKILL)
            rank.code = rank.process.returncode = os.waitstatus_to_exitcode(os.waitpid(rank.pid, 0)[1])
            self._guard.forget(rank.pid)
        kill_at = time.monotonic() + _GRACE_S if self._kill_at is None else self._kill_at
        end_leftovers(self._plan.job, (), max(kill_at - time.monotonic(), _LEAST_GRACE_S))

    # -- output

    def _say(self, text: str) -> None:
        self._err.add(f"multiring: {text}\n".encode())

    def _write_all(self) -> None:
        """Hand on what is left; a slow reader is waited for, unless a signal says not to."""
        for rank in self._ranks:
            for stream in (rank.out, rank.err):
                stream.drain()
                stream.close()
        while not (self._out.is_empty and self._err.is_empty) and not self._signals.take():
            self._poll(None)


def _death_with_parent() -> Callable[[], None]:
    """Return what a child runs between fork and exec to be killed when this process, however it dies, is gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def die_with_parent() -> None:
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0 or os.getppid() != parent:
            os._exit(1)  # the parent died before the kernel was told

    return die_with_parent


def _ranks_text(ranks: Sequence[_Rank]) -> str:
    numbers = ", ".join(str(rank.number) for rank in ranks[:16])
    more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers}{more}"
