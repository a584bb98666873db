"""Run a job's processes on this machine, and end every process of the job.

The launcher uses one thread with one loop.

A job passes through these states: running -> (a process failed) settling -> stopping -> over. A rank can die slowly,
for example while its interpreter shuts down. Then other ranks raise PeerLostError and end before it. Their failure is
a consequence. In the settling state the launcher waits for the rank whose failure is the cause.
"""

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, BinaryIO, cast

from multiring._launch.commands import CommandError
from multiring._launch.hints import hints_for
from multiring._launch.host_discovery import DiscoveryOptions
from multiring._launch.job_process import JobProcess, Start, spawn, text_of
from multiring._launch.leftovers import signal_group
from multiring._launch.live_record import LiveRecord
from multiring._launch.logs import open_log
from multiring._launch.memory_limit import MemoryKills
from multiring._launch.output import RANKS_LINE_BYTES, LineTagger, RankStream, ShownOutput, outlets
from multiring._launch.signals import PASSED_ON, StopSignals
from multiring._launch.tracebacks import TracebackFolder, Tracebacks
from multiring._limits.processes import is_limit, limits_told
from multiring.errors import ArgumentError, LaunchError

_SETTLE_S = 1.0
_CULPRIT_S = 5.0  # how long to wait for the end of a rank that other ranks have reported as lost
_REPEATED_S = 2.0  # a SIGTERM that comes again within this time is the same request
GRACE_S = 2.0  # how long the other processes have to stop after a failure before they are killed
_LONGEST_GRACE_S = 86_400.0
_STUCK_S = 10.0  # how long to wait for the end of a killed process
_LEAST_GRACE_S = 0.3  # the least grace of processes that are found after the ranks have ended
_PAUSE_S = 0.01
_BROKEN_PIPE_CODE = 128 + signal.SIGPIPE


def log_files(name: str) -> tuple[str, str]:
    """Return the names of the stdout and stderr log files of a process."""
    return f"{name}.out", f"{name}.err"


def rank_logs(rank: int, _ranks: int) -> tuple[str, str]:
    """Return the names of the log files for a rank's stdout and stderr."""
    return log_files(f"rank-{rank}")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    """Options of a job.

    Args:
        log_dir: a folder for untagged copies of the ranks' output, or None for no copies.
        logs: takes a rank and the number of ranks; returns the names of the files in `log_dir` for the rank's stdout
            and stderr. Default: rank-K.out and rank-K.err.
        horovod: `import horovod` means multiring in the ranks (`multiring._launch.horovod`).
        timeline: the timeline file of the ranks. It overrides MULTIRING_TIMELINE.
        grace_s: seconds from a signal (Ctrl-C, SIGTERM) to killing the ranks. They may save their work in this time.
        variables: variables to add to the ranks' environment.
        stdin_rank: the rank that reads this process's standard input. The other ranks' input is empty.
        mpiexec_words: more arguments for mpiexec, if it starts the ranks.
        ssh_words: more options for ssh, if it starts the ranks.
        max_restarts: how often to start all ranks again after a failure.
        min_ranks: the ranks go on without lost ones, as long as so many are left; None ends the job at the first loss.
        max_ranks: with `min_ranks`: newcomers replace lost ranks, and more are started until there are so many ranks.
        reset_limit: how many lost ranks are replaced.
        discovery: with `max_ranks`: a script names the hosts.
        cooldown_s: for how many seconds a host that has failed twice gets no newcomers: at first, and at most.
        record: where to write what becomes of the job, or None.
        reports_steps: the ranks report their steps; set with a record.

    Raises:
        ArgumentError: `grace_s` is not between 0 and one day, `max_restarts` or `reset_limit` is negative, `min_ranks`
            is below 1, or `max_ranks` is set without `min_ranks` or below it.
    """

    log_dir: Path | None = None
    logs: Callable[[int, int], tuple[str, str]] = rank_logs
    horovod: bool = False
    timeline: Path | None = None
    grace_s: float = 30.0  # the same as torchrun's
    variables: Mapping[str, str] = field(default_factory=dict)
    stdin_rank: int | None = None
    mpiexec_words: tuple[str, ...] = ()
    ssh_words: tuple[str, ...] = ()
    max_restarts: int = 0
    min_ranks: int | None = None
    max_ranks: int | None = None
    reset_limit: int = 100
    discovery: DiscoveryOptions | None = None
    cooldown_s: tuple[float, float] = (10.0, 300.0)
    record: LiveRecord | None = None
    reports_steps: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.grace_s <= _LONGEST_GRACE_S:  # the comparison also rejects NaN
            raise ArgumentError(f"a grace of {self.grace_s:g} s: want 0 to {_LONGEST_GRACE_S:.0f} s, a day")
        if self.max_restarts < 0:
            raise ArgumentError(f"{self.max_restarts} restarts: want 0 or more")
        if self.min_ranks is not None and self.min_ranks < 1:
            raise ArgumentError(f"at least {self.min_ranks} ranks: want 1 or more")

        if self.max_ranks is not None and self.max_ranks < (self.min_ranks or self.max_ranks + 1):
            raise ArgumentError(f"--max-ranks {self.max_ranks}: want --min-ranks, too, and not more than that")
        if self.discovery is not None and self.max_ranks is None:
            raise ArgumentError("--host-discovery: want --min-ranks and --max-ranks, too: hosts come and go")
        if self.reset_limit < 0:
            raise ArgumentError(f"--reset-limit {self.reset_limit}: want 0 or more")
        if not 0 <= self.cooldown_s[0] <= self.cooldown_s[1]:
            raise ArgumentError(
                f"--blacklist-cooldown-range {self.cooldown_s[0]:g} {self.cooldown_s[1]:g}: want two times in seconds, "
                "of which the second is not shorter"
            )

    def refuse_min_ranks(self, how: str) -> None:
        """Raise ArgumentError if `min_ranks` is set; `how` says what starts the ranks."""
        if self.min_ranks is not None:
            raise ArgumentError(
                f"--min-ranks {self.min_ranks} {how}: ranks go on without lost ones on one host, with --hosts by ssh, "
                "with --nodes, and in an allocation of Slurm"
            )


class Job:
    """The launcher's loop and its state.

    A subclass sets up what the processes need, and ends the processes that they leave behind.
    """

    def __init__(self, starts: Sequence[Start], log_dir: Path | None, grace_s: float = GRACE_S) -> None:
        self._starts = starts
        self._log_dir = log_dir
        self._grace_s = grace_s  # from a signal to killing the processes
        self._out, self._err = outlets()
        self._tracebacks = Tracebacks()
        self._members: list[JobProcess] = []
        self._failed: list[JobProcess] = []  # in the order in which the failures were found
        self._patience_s = 0.0  # how long other processes may run on after a failure that has no other cause
        self._settle_until: float | None = None
        self._asked_s = 0.0  # when a signal has asked for the end
        self._kill_at: float | None = None  # when to kill the processes; set when the job is being stopped
        self._killed = False
        self._stuck_at = 0.0  # when to give up waiting for the end of killed processes
        self._memory = MemoryKills()
        self._code: int | None = None  # the job's exit code, decided by the first failure or signal
        self.was_stopped = False  # a signal, or the end of the output's reader, stopped the job

    def run(self) -> int:
        """Run the job to its end and return its exit code.

        No process of the job is left afterwards.
        """
        with contextlib.ExitStack() as stack:
            self._signals = stack.enter_context(StopSignals())
            self._open(stack)
            # On every exit, also after an internal error, end the processes before their resources are released.
            stack.callback(self._end_everyone)
            self._start_all()
            while self._goes_on():
                self._turn()
            self._end_everyone()
            self._conclude()
            self._write_all()
        self.was_stopped |= self._signals.have_asked_for_end  # perhaps at the very end
        return self._code or 0

    # -- methods for a subclass to override

    def _open(self, stack: contextlib.ExitStack) -> None:
        """Create the resources of the processes; `stack` releases them after the processes have ended."""

    def _born(self, member: JobProcess) -> None:
        """React to the start of a process."""

    def _reaping(self, pid: int) -> None:
        """React to the end of a process while the system still knows the process."""

    def _reaped(self, pid: int) -> None:
        """React to the end of a process. The system may reuse its ID from now on."""

    def _stop_leftovers(self, known: set[int]) -> None:
        """Ask the processes that members started, except `known`, to end."""

    def _end_leftovers(self, grace_s: float) -> None:
        """End every process that members started; kill processes that still run after `grace_s` seconds."""

    def _lost_by(self, member: JobProcess) -> set[JobProcess] | None:
        """Return the members that `member` reported as lost; None if it lost a member without naming the member."""
        return None if member.is_consequence else set()

    def _goes_on(self) -> bool:
        """Return whether the job has not ended yet."""
        return bool(self._running())

    def _signal(self, member: JobProcess, number: int) -> None:
        """Send a signal to a process and its group."""
        signal_group(member.pid, number)

    def _pass_on(self, number: int) -> None:
        """Forward a signal that does not ask for an end."""
        for member in self._running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, number)

    def _wait_for_reader(self) -> None:
        """Wait until some of the rest of the output may be written, after the job's end."""
        self._poll(None)

    def _conclude(self) -> None:
        """Print messages about the job as a whole, after every process has ended."""

    def _watch_more(self, poll: selectors.BaseSelector) -> None:
        """Register more descriptors with `poll`, each with a callable without arguments as its data."""

    def _wake_at(self) -> float | None:
        """Return the monotonic time at which `_do_more` must run, or None if there is no set time."""
        return None

    def _do_more(self) -> None:
        """Do the subclass's own work; called on every turn of the loop."""

    # -- starting

    def _start_all(self) -> None:
        for start in self._starts:
            try:
                self._members.append(self._start(start))
            except OSError as error:
                counts = len(self._members), len(self._starts)
                raise _start_error(start, error, counts) from None
            self._born(self._members[-1])

    def _start(self, start: Start) -> JobProcess:
        logs = [open_log(self._log_dir, name) for name in start.log_files]
        process = spawn(start)
        pipes = cast("IO[bytes]", process.stdout), cast("IO[bytes]", process.stderr)
        out, err = (RankStream(pipe, output) for pipe, output in zip(pipes, self._outputs(start, logs), strict=True))
        return JobProcess(start.name, process, out, err)

    def _outputs(self, start: Start, logs: Sequence[BinaryIO | None]) -> tuple[ShownOutput, ShownOutput]:
        """Return what becomes of the stdout and stderr of a new process."""
        taggers = start.taggers or tuple(
            LineTagger(start.tag.encode(), is_live=start.has_stdin, line_bytes=RANKS_LINE_BYTES) for _ in logs
        )
        is_seen_live = start.has_stdin or start.taggers is not None
        folder = None if is_seen_live else TracebackFolder(self._tracebacks, start.name)
        out = ShownOutput(taggers[0], self._out, logs[0])
        return out, ShownOutput(taggers[1], self._err, logs[1], folder)

    # -- one turn of the loop

    def _running(self) -> list[JobProcess]:
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
        """Read and write what is ready, and return at the monotonic time `wake` at the latest."""
        with selectors.PollSelector() as poll:
            poll.register(self._signals.descriptor, selectors.EVENT_READ, self._signals.clear)
            for outlet in {id(each): each for each in (self._out, self._err)}.values():
                if not outlet.is_empty:
                    poll.register(outlet.descriptor, selectors.EVENT_WRITE, outlet.write_some)
            for member in self._members:
                for stream in (member.out, member.err):
                    if isinstance(stream, RankStream) and stream.is_open and not stream.outlet.is_full:
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

    def _reap_ended(self) -> list[JobProcess]:
        """Return the processes that have ended since the last call."""
        ended = []
        for member in self._running():
            if os.waitid(os.P_PID, member.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            self._reaping(member.pid)
            _, status = os.waitpid(member.pid, 0)
            member.set_code(os.waitstatus_to_exitcode(status))
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

    def _is_consequence(self, member: JobProcess) -> bool:
        """Return whether `member` may have failed because of another member.

        This is the case if `member` has lost another member, which has failed too or has not ended yet.
        """
        lost = self._lost_by(member)
        others = [each for each in self._members if each is not member] if lost is None else lost
        return any(each.code is None or each.has_failed for each in others)

    def _stop_because_of(self, cause: JobProcess) -> None:
        self._tell_failure(cause)
        for member in self._members:
            if member.code == 0:
                self._say(f"{member.name} had ended normally (exit code 0) before that")
            elif member.has_failed and member is not cause:
                self._say(f"{member.name} failed too: {member.ending}")
        self._stop(cause.exit_code)

    def _tell_failure(self, cause: JobProcess) -> None:
        self._say(f"{cause.name} (pid {cause.known_as or cause.pid}{cause.place}) failed: {cause.ending}")
        if told := self._memory.told_of(cause):
            self._say(told)
        lines = cause.err.last_lines
        self._say("its last lines on stderr:" if lines else "it wrote nothing on stderr")
        self._err.add(b"".join(b"    " + line + b"\n" for line in lines))
        for hint in hints_for(lines):
            self._say(hint)

    # -- stopping the others

    def _on_signal(self, number: int) -> None:
        if number in PASSED_ON:
            self._pass_on(number)
            return
        if self._kill_at is not None:
            # At a time limit Slurm sends SIGTERM twice at once, and means one request. At a machine's end, this process
            # gets its own SIGTERM, and that of its keeper, which was asked, too.
            if number != signal.SIGTERM or time.monotonic() >= self._asked_s + _REPEATED_S:
                self._kill_at = time.monotonic()  # the second signal asks for an immediate end
            return
        self.was_stopped, self._asked_s = True, time.monotonic()
        self._say(f"{signal.Signals(number).name} received")
        self._stop(128 + number, number, self._grace_s)

    def _stop(self, code: int, number: int = signal.SIGTERM, grace_s: float = GRACE_S) -> None:
        self._code = code
        self._kill_at = time.monotonic() + grace_s
        running = self._running()
        if running:
            patience = f", which may take {grace_s:g} s; a second signal kills now" if grace_s > GRACE_S else ""
            self._say(f"stopping {text_of(running)}{patience}")
        for member in running:
            self._signal(member, number)
            self._signal(member, signal.SIGCONT)  # a stopped process does not handle signals
        self._stop_leftovers({member.pid for member in running})

    def _kill(self) -> None:
        self._killed = True
        self._stuck_at = time.monotonic() + _STUCK_S
        running = self._running()
        if running:
            self._say(f"killing {text_of(running)}, which did not stop")
        for member in running:
            self._signal(member, signal.SIGKILL)

    def _end_everyone(self) -> None:
        """Kill and reap every process of the job, in any state of the job."""
        for member in self._running():
            self._signal(member, signal.SIGKILL)
        until = time.monotonic() + _STUCK_S
        while self._running() and time.monotonic() < until:
            self._reap_ended()
            self._wait_for_ends(_PAUSE_S if self._running() else 0)
        self._leave_stuck(self._running())
        left_s = GRACE_S if self._kill_at is None else min(self._kill_at - time.monotonic(), GRACE_S)
        self._end_leftovers(max(left_s, _LEAST_GRACE_S))

    def _wait_for_ends(self, pause_s: float) -> None:
        """Wait a moment for the ends of processes that were killed."""
        time.sleep(pause_s)

    def _leave_stuck(self, members: Sequence[JobProcess]) -> None:
        """Report killed processes that have not ended, and treat them as ended."""
        if members:
            self._say(
                f"{text_of(members)} ({', '.join(f'pid {each.pid}' for each in members)}) was killed {_STUCK_S:g} s "
                "ago and has not ended: the kernel holds it, for example because a file system does not answer, or a "
                "debugger holds it. It is left behind"
            )
        for member in members:
            member.set_code(-signal.SIGKILL)
            self._reaped(member.pid)

    # -- output

    def _say(self, text: str) -> None:
        self._err.add(f"multiring: {text}\n".encode())

    def _write_all(self) -> None:
        """Write the rest of the output. Wait for a slow reader until a signal arrives."""
        for member in self._members:
            for stream in (member.out, member.err):
                stream.drain()
                stream.close()
        while not (self._out.is_empty and self._err.is_empty) and not self._signals.take():
            self._wait_for_reader()


def _start_error(start: Start, error: OSError, counts: tuple[int, int]) -> LaunchError:
    """Return the error for a process that could not be started; `counts` are the processes started and wanted."""
    program = start.command[0]
    if isinstance(error, FileNotFoundError):
        return CommandError(f"cannot execute {program!r}: its interpreter does not exist", 127)
    if isinstance(error, (PermissionError, IsADirectoryError)) or "Exec format" in str(error):
        return CommandError(f"cannot execute {program!r}: {error.strerror}", 126)
    kind = start.name.partition(" ")[0]
    limits = limits_told() if is_limit(error) else ""
    return LaunchError(f"started {counts[0]} of {counts[1]} {kind}s, then: {error.strerror}{limits}")
