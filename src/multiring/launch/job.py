"""Run a job's processes on this machine: one thread, one loop, nothing left behind.

The life of a job: running -> (a process failed) settling -> stopping -> over. Settling exists because a rank that
dies slowly, say while its interpreter shuts down, is overtaken by the ranks that miss it and raise PeerLostError:
their failure is a consequence, and the cause gets a moment to come forward.
"""

import contextlib
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, cast

from multiring.errors import ArgumentError, LaunchError, PeerLostError, RendezvousError
from multiring.launch.commands import CommandError
from multiring.launch.leftovers import signal_group
from multiring.launch.logs import open_log
from multiring.launch.memory_limit import group_here, killed_for_memory, limit_bytes
from multiring.launch.output import RANKS_LINE_BYTES, LineTagger, RankStream, Tagger, outlets
from multiring.launch.signals import PASSED_ON, StopSignals
from multiring.launch.tracebacks import TracebackFolder, Tracebacks

_SETTLE_S = 1.0
_CULPRIT_S = 5.0  # how long the end of a rank is waited for that others have lost
_GRACE_S = 2.0  # from asking the processes to stop to killing them, where one of them failed
_LONGEST_GRACE_S = 86_400.0
_STUCK_S = 10.0  # from killing a process to going on without its end
_LEAST_GRACE_S = 0.3  # what processes found last are given
# The last line of a traceback; torch's own hook writes the rank before it.
_CONSEQUENCES = re.compile(
    rb"(?:\[rank\d+\]: )?"
    + f"{PeerLostError.__module__}.(?:{PeerLostError.__name__}|{RendezvousError.__name__})".encode()
)
_HINTS = {  # last words of a rank, which have a remedy that is the launcher's
    b"No module named 'horovod'": "a program written for Horovod gets multiring under that name with --horovod: "
    "multiring run --horovod ... (docs/horovod.md)",
    b"No module named 'multiring'": f"this program's Python is another than multiring's, {sys.executable}: activate "
    "its environment, or name the script alone, as in `multiring run -n 2 script.py`, which takes that Python",
}
_PAUSE_S = 0.01
_BROKEN_PIPE_CODE = 128 + signal.SIGPIPE


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """A process to start. `name` is what messages call it: a kind and, where there are several, a number.

    `prepare` runs in it between fork and exec; `birthplace` is entered by this process while it forks. With `has_stdin`
    it reads this process's standard input, and what it writes is shown before its line ends: it may be a question.
    """

    name: str
    tag: str
    log_files: tuple[str, str]  # of its stdout and stderr, within the job's folder for them
    command: tuple[str, ...]
    environment: Mapping[str, str]
    prepare: Callable[[], None]
    birthplace: Callable[[], AbstractContextManager[object]] = nullcontext
    has_stdin: bool = False
    taggers: tuple[Tagger, Tagger] | None = None  # of its stdout and stderr, where `tag` does not say all


@dataclass(slots=True, eq=False)
class Member:
    """A started process of the job. `code` is None while it runs, then its exit code, or -n for signal n.

    `is_excused`: its end was asked for, and counts as no failure.
    """

    name: str
    process: "subprocess.Popen[bytes]"
    out: RankStream
    err: RankStream
    code: int | None = None
    is_excused: bool = False
    known_as: int = 0  # its process's number to the user, where that is another

    @property
    def pid(self) -> int:
        """Its process, and the process group it leads."""
        return self.process.pid

    @property
    def has_failed(self) -> bool:
        """Whether it ended otherwise than it should."""
        return self.code not in (None, 0) and not self.is_excused

    @property
    def is_consequence(self) -> bool:
        """Whether it failed because it lost another rank, by its own last words."""
        return self.has_failed and any(map(_CONSEQUENCES.match, self.err.last_lines))

    @property
    def exit_code(self) -> int:
        """What a shell would say: 128 + n for signal n."""
        code = self.code or 0
        return code if code >= 0 else 128 - code

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        if self.code is None:
            return "is running"
        if self.code >= 0:
            return f"exit code {self.code}"
        try:
            return f"killed by {signal.Signals(-self.code).name}"
        except ValueError:
            return f"killed by signal {-self.code}"


def log_files(name: str) -> tuple[str, str]:
    """Return the files of the stdout and stderr of what is called `name`."""
    return f"{name}.out", f"{name}.err"


def rank_logs(rank: int, _ranks: int) -> tuple[str, str]:
    """Return the files of a rank's stdout and stderr."""
    return log_files(f"rank-{rank}")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    """How a job runs.

    log_dir: where each rank's output goes as well, untagged, as rank-K.out and rank-K.err, or as `logs` has it.
    logs: a rank, and how many there are -> the files of its stdout and stderr within `log_dir`.
    horovod: ranks take multiring for Horovod (`multiring.launch.horovod`).
    timeline: where the ranks write one, whatever MULTIRING_TIMELINE says.
    grace_s: seconds from a signal (Ctrl-C, SIGTERM) to killing, in which ranks may save their work.
    variables: what is added to the ranks' environment.
    stdin_rank: the rank that reads this process's standard input; the others' is empty.
    mpiexec_words: what mpiexec is told besides, where it starts the ranks.
    max_restarts: how often all ranks are started anew after one has failed.

    Raises:
        ArgumentError: there can be no such grace, or so many restarts.
    """

    log_dir: Path | None = None
    logs: Callable[[int, int], tuple[str, str]] = rank_logs
    horovod: bool = False
    timeline: Path | None = None
    grace_s: float = 30.0  # torchrun's
    variables: Mapping[str, str] = field(default_factory=dict)
    stdin_rank: int | None = None
    mpiexec_words: tuple[str, ...] = ()
    max_restarts: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.grace_s <= _LONGEST_GRACE_S:  # nor is NaN
            raise ArgumentError(f"a grace of {self.grace_s:g} s: want 0 to {_LONGEST_GRACE_S:.0f} s, a day")
        if self.max_restarts < 0:
            raise ArgumentError(f"{self.max_restarts} restarts: want 0 or more")


class Job:
    """The loop and its state. A subclass says what the processes stand on, and what ends those that they leave."""

    def __init__(self, starts: Sequence[Start], log_dir: Path | None, grace_s: float = _GRACE_S) -> None:
        self._starts = starts
        self._log_dir = log_dir
        self._grace_s = grace_s  # after a signal
        self._out, self._err = outlets()
        self._tracebacks = Tracebacks()
        self._members: list[Member] = []
        self._failed: list[Member] = []  # in the order found
        self._patience_s = 0.0  # how long others may go on after a failure that is no consequence
        self._settle_until: float | None = None
        self._kill_at: float | None = None  # set once the job is being stopped
        self._killed = False
        self._stuck_at = 0.0  # when killed processes are waited for no longer
        self._memory = group_here()
        self._killed_before = killed_for_memory(self._memory)
        self._code: int | None = None  # decided by the first failure or signal
        self.was_stopped = False  # by a signal, or as nobody reads any more: by no failure of the job's

    def run(self) -> int:
        """Run to the end and return the job's exit code; nothing of the job is left then."""
        with contextlib.ExitStack() as stack:
            self._signals = stack.enter_context(StopSignals())
            self._open(stack)
            # However this ends, and also by a bug of ours: first the processes, then what they stand on.
            stack.callback(self._end_everyone)
            self._start_all()
            while self._running():
                self._turn()
            self._end_everyone()
            self._conclude()
            self._write_all()
        return self._code or 0

    # -- what a subclass says

    def _open(self, stack: contextlib.ExitStack) -> None:
        """Make what the processes need; `stack` takes it down after their end."""

    def _born(self, member: Member) -> None:
        """A process was started."""

    def _reaped(self, pid: int) -> None:
        """A process was reaped: its number may come to mean something else."""

    def _stop_leftovers(self, known: set[int]) -> None:
        """Ask what the processes started, less `known`, to end."""

    def _end_leftovers(self, grace_s: float) -> None:
        """Leave nothing of what the processes started; give it `grace_s` seconds if it was asked already."""

    def _lost_by(self, member: Member) -> set[Member] | None:
        """Return whom a member says that it has lost; None where it does not know, or does not say."""
        return None if member.is_consequence else set()

    def _pass_on(self, number: int) -> None:
        """Hand a signal on that asks for no end."""
        for member in self._running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, number)

    def _conclude(self) -> None:
        """Say what there is to say of the job as a whole; every process has ended."""

    def _watch_more(self, poll: selectors.BaseSelector) -> None:
        """Register what else the loop serves: data is a callable without arguments."""

    def _wake_at(self) -> float | None:
        """Return when, by the monotonic clock, `_do_more` has something to do; None: not until something happens."""
        return None

    def _do_more(self) -> None:
        """Do what is due; called on every turn."""

    # -- starting

    def _start_all(self) -> None:
        for start in self._starts:
            try:
                self._members.append(self._start(start))
            except OSError as error:
                counts = len(self._members), len(self._starts)
                raise _start_error(start, error, counts) from None
            self._born(self._members[-1])

    def _start(self, start: Start) -> Member:
        logs = [open_log(self._log_dir, name) for name in start.log_files]
        with start.birthplace():
            process = subprocess.Popen(  # noqa: S603 -- running the user's command is what this is for
                start.command,
                bufsize=0,
                stdin=None if start.has_stdin else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=start.environment,
                start_new_session=True,  # a group of its own, with what it will start
                preexec_fn=start.prepare,  # noqa: PLW1509 -- this process has one thread
            )
        # Both are pipes, as asked for above.
        taggers = start.taggers or tuple(
            LineTagger(start.tag.encode(), is_live=start.has_stdin, line_bytes=RANKS_LINE_BYTES) for _ in logs
        )
        is_seen_live = start.has_stdin or start.taggers is not None
        folder = None if is_seen_live else TracebackFolder(self._tracebacks, start.name)
        out = RankStream(cast("IO[bytes]", process.stdout), taggers[0], self._out, logs[0])
        err = RankStream(cast("IO[bytes]", process.stderr), taggers[1], self._err, logs[1], folder)
        return Member(start.name, process, out, err)

    # -- one turn of the loop

    def _running(self) -> list[Member]:
        return [member for member in self._members if member.code is None]

    def _turn(self) -> None:
        self._poll(self._next_wake())
        self._reap()
        self._do_more()
        self._watch_outlets()
        for number in self._signals.take():
            self._on_signal(number)
        now = time.monotonic()
        if self._settle_until is not None and self._kill_at is None and now >= self._settle_until:
            self._stop_because_of(self._failed[0])
        if self._kill_at is not None and now >= self._kill_at and not self._killed:
            self._kill()
        elif self._killed and now >= self._stuck_at:
            self._leave_stuck(self._running())

    def _next_wake(self) -> float | None:
        own = self._settle_until if self._kill_at is None else self._stuck_at if self._killed else self._kill_at
        return min((at for at in (own, self._wake_at()) if at is not None), default=None)

    def _poll(self, wake: float | None) -> None:
        """Move what can be moved, and return at the latest when `wake`, by the monotonic clock, has come."""
        with selectors.PollSelector() as poll:
            poll.register(self._signals.descriptor, selectors.EVENT_READ, self._signals.clear)
            for outlet in {id(each): each for each in (self._out, self._err)}.values():
                if not outlet.is_empty:
                    poll.register(outlet.descriptor, selectors.EVENT_WRITE, outlet.write_some)
            for member in self._members:
                for stream in (member.out, member.err):
                    if stream.is_open and not stream.outlet.is_full:
                        poll.register(stream.descriptor, selectors.EVENT_READ, stream.read_some)
            self._watch_more(poll)
            for key, _ in poll.select(None if wake is None else max(0.0, wake - time.monotonic())):
                key.data()

    def _watch_outlets(self) -> None:
        for member in self._members:
            for stream in (member.out, member.err):
                if stream.log_failure is not None:
                    self._say(f"{member.name}'s log is cut off: {stream.log_failure.strerror}")
                    stream.log_failure = None
        failure, self._out.failure_to_report = self._out.failure_to_report, None
        if isinstance(failure, BrokenPipeError):
            self._say("nobody reads the output any more")
            if self._kill_at is None:
                self.was_stopped = True
                self._stop(_BROKEN_PIPE_CODE)
        elif failure is not None:
            self._say(f"the ranks' output is cut off: {failure.strerror}")

    # -- processes that end

    def _reap(self) -> None:
        for member in self._reap_ended():
            member.out.drain()
            member.err.drain()
            if member.has_failed:
                self._failed.append(member)
        if self._failed and self._code is None:
            self._judge()

    def _reap_ended(self) -> list[Member]:
        """Return the processes that have ended since the last call."""
        ended = []
        for member in self._running():
            pid, status = os.waitpid(member.pid, os.WNOHANG)
            if pid:
                member.code = member.process.returncode = os.waitstatus_to_exitcode(status)
                self._reaped(member.pid)
                ended.append(member)
        return ended

    def _judge(self) -> None:
        cause = next((member for member in self._failed if not self._is_consequence(member)), None)
        if not self._running():
            self._stop_because_of(cause or self._failed[0])
        elif cause is not None and not self._patience_s:
            self._stop_because_of(cause)
        elif self._settle_until is None:
            knows = any(self._lost_by(member) for member in self._failed)
            self._settle_until = time.monotonic() + (self._patience_s or (_CULPRIT_S if knows else _SETTLE_S))

    def _is_consequence(self, member: Member) -> bool:
        """Return whether a failure may be another's: the member lost one that failed too, or has not ended yet."""
        lost = self._lost_by(member)
        others = [each for each in self._members if each is not member] if lost is None else lost
        return any(each.code is None or each.has_failed for each in others)

    def _stop_because_of(self, cause: Member) -> None:
        self._say(f"{cause.name} (pid {cause.known_as or cause.pid}) failed: {cause.ending}")
        if cause.code == -signal.SIGKILL and killed_for_memory(self._memory) > self._killed_before:
            limit = limit_bytes(self._memory)
            most = "" if limit is None else f" of {limit / (1 << 20):.0f} MiB"
            self._say(
                f"the system killed it, as the memory of its control group{most} ({self._memory}) was at an end: want "
                "more, smaller models or batches, or fewer ranks"
            )
        lines = cause.err.last_lines
        self._say("its last lines on stderr:" if lines else "it wrote nothing on stderr")
        self._err.add(b"".join(b"    " + line + b"\n" for line in lines))
        for words, hint in _HINTS.items():
            if any(words in line for line in lines):
                self._say(hint)
        for member in self._members:
            if member.code == 0:
                self._say(f"{member.name} had ended normally (exit code 0) before that")
            elif member.has_failed and member is not cause:
                self._say(f"{member.name} failed too: {member.ending}")
        self._stop(cause.exit_code)

    # -- stopping the others

    def _on_signal(self, number: int) -> None:
        if number in PASSED_ON:
            self._pass_on(number)
            return
        if self._kill_at is not None:
            self._kill_at = time.monotonic()  # asked twice
            return
        self.was_stopped = True
        self._say(f"{signal.Signals(number).name} received")
        self._stop(128 + number, number, self._grace_s)

    def _stop(self, code: int, number: int = signal.SIGTERM, grace_s: float = _GRACE_S) -> None:
        self._code = code
        self._kill_at = time.monotonic() + grace_s
        running = self._running()
        if running:
            patience = f", which may take {grace_s:g} s; once more ends it now" if grace_s > _GRACE_S else ""
            self._say(f"stopping {text_of(running)}{patience}")
        for member in running:
            signal_group(member.pid, number)
            signal_group(member.pid, signal.SIGCONT)  # a stopped process hears nothing
        self._stop_leftovers({member.pid for member in running})

    def _kill(self) -> None:
        self._killed = True
        self._stuck_at = time.monotonic() + _STUCK_S
        running = self._running()
        if running:
            self._say(f"killing {text_of(running)}, which did not stop")
        for member in running:
            signal_group(member.pid, signal.SIGKILL)

    def _end_everyone(self) -> None:
        """Leave no process of the job, whatever state it is in."""
        for member in self._running():
            signal_group(member.pid, signal.SIGKILL)
        until = time.monotonic() + _STUCK_S
        while self._running() and time.monotonic() < until:
            self._reap_ended()
            time.sleep(_PAUSE_S if self._running() else 0)
        self._leave_stuck(self._running())
        left_s = _GRACE_S if self._kill_at is None else min(self._kill_at - time.monotonic(), _GRACE_S)
        self._end_leftovers(max(left_s, _LEAST_GRACE_S))

    def _leave_stuck(self, members: Sequence[Member]) -> None:
        """Go on without the end of killed processes, which nothing can hasten."""
        if members:
            self._say(
                f"{text_of(members)} ({', '.join(f'pid {each.pid}' for each in members)}) was killed {_STUCK_S:g} s "
                "ago and has not ended: the kernel holds it, as for a file system that does not answer, or a debugger "
                "does. It is left behind"
            )
        for member in members:
            member.code = member.process.returncode = -signal.SIGKILL
            self._reaped(member.pid)

    # -- output

    def _say(self, text: str) -> None:
        self._err.add(f"multiring: {text}\n".encode())

    def _write_all(self) -> None:
        """Hand on what is left; a slow reader is waited for, unless a signal says not to."""
        for member in self._members:
            for stream in (member.out, member.err):
                stream.drain()
                stream.close()
        while not (self._out.is_empty and self._err.is_empty) and not self._signals.take():
            self._poll(None)


def text_of(members: Sequence[Member]) -> str:
    """Return the names of members in few words: "rank 3", or "ranks 0, 1 and 20 more"."""
    kind, _, _ = members[0].name.partition(" ")
    if len(members) == 1:
        return members[0].name
    numbers = ", ".join(member.name.partition(" ")[2] for member in members[:16])
    more = f" and {len(members) - 16} more" if len(members) > 16 else ""
    return f"{kind}s {numbers}{more}"


def _start_error(start: Start, error: OSError, counts: tuple[int, int]) -> LaunchError:
    """Return the error of a process that could not be started, after so many of all."""
    program = start.command[0]
    if isinstance(error, FileNotFoundError):
        return CommandError(f"cannot execute {program!r}: its interpreter does not exist", 127)
    if isinstance(error, (PermissionError, IsADirectoryError)) or "Exec format" in str(error):
        return CommandError(f"cannot execute {program!r}: {error.strerror}", 126)
    kind = start.name.partition(" ")[0]
    return LaunchError(f"started {counts[0]} of {counts[1]} {kind}s, then: {error.strerror}")
