"""The connections of a job on several hosts: what the launcher hears from the agents, and what it makes of it."""

import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from multiring._launch.commands import CommandError
from multiring._launch.control_link import CALL, OUTCOME, QUIET_S, SILENT_S, STDIN, STDOUT, StreamData
from multiring._launch.control_tcp import ControlListener
from multiring._launch.host_sessions import HostSession, HostSessions
from multiring._launch.job import Job, JobOptions
from multiring._launch.job_process import JobProcess
from multiring._launch.live_record import JobRecorder
from multiring._launch.output import ShownOutput
from multiring._launch.pickled_call import CallFolder
from multiring._launch.signals import PASSED_ON
from multiring._runtime.bootstrap.handshake import Message
from multiring._steps.step_report import report_in
from multiring._version import VERSION
from multiring.errors import LaunchError

_SAME_SIGNAL_S = 5.0  # a scheduler sends a signal to all hosts; one that comes again within this time is the same
_AGAIN_S = 0.2
_STDIN_BYTES = 1 << 14
_MOST_UNREAD_BYTES = 1 << 18


class ToldLines:
    """The output of a rank that its own agent shows: only its last lines are known here."""

    def __init__(self) -> None:
        self.last_lines: list[bytes] = []
        self.log_failure: OSError | None = None

    def drain(self) -> None:
        """Do nothing: there is no data."""

    def close(self) -> None:
        """Do nothing: there is no data."""


class SignalCounts:
    """Finds signals that a scheduler sends to all hosts: several hosts report one signal.

    A signal that comes from one host again is another one, such as a second Ctrl-C.
    """

    def __init__(self) -> None:
        self._last_s: dict[int, float] = {}
        self._counts: dict[int, dict[int | None, int]] = {}  # signal -> host -> how often it has reported the signal

    def is_new(self, number: int, host: int | None) -> bool:
        """Record a signal from a host (None: from this process), and return whether no other host has reported it."""
        now = time.monotonic()
        if now >= self._last_s.get(number, now) + _SAME_SIGNAL_S:
            self._counts[number] = {}
        self._last_s[number] = now
        counts = self._counts.setdefault(number, {})
        most = max(counts.values(), default=0)
        counts[host] = counts.get(host, 0) + 1
        return counts[host] > most


class _StdinReader:
    """Sends this process's standard input to a rank on another host, as fast as the rank reads it."""

    def __init__(self, rank: int, start: int) -> None:
        self.rank, self._start = rank, start
        self.unread_bytes = 0  # what was sent and the rank has not read
        self._is_open = True

    def watch(self, poll: selectors.BaseSelector, session: HostSession) -> None:
        """Register standard input with `poll`; `session` is that of the rank's host."""
        if self._is_open and self.unread_bytes < _MOST_UNREAD_BYTES:
            poll.register(0, selectors.EVENT_READ, lambda: self._read(session))

    def _read(self, session: HostSession) -> None:
        try:
            data = os.read(0, _STDIN_BYTES)
        except OSError:
            data = b""
        self._is_open = bool(data)
        self.unread_bytes += len(data)
        if session.link is not None:
            session.link.send_stream(self._start, self.rank, STDIN, data)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostsTask:
    """What the ranks of all hosts run.

    - sent: what the agents that have no task of their own need; the keys are those of `host_agent`.
    - rendezvous: the address that the user chose for the rendezvous, or None.
    - interface, ports: the user's settings for this address otherwise.
    - patience_s: how long the launcher waits for the agents of all hosts.
    - absent: what to say of a host that did not come.
    - secret: the job's secret.
    - wire_timeout_s: how long ranks take a silent wire for slow.
    - call: the call whose outcomes are wanted, or None if the ranks run a command only.
    """

    sent: Mapping[str, Any] = field(repr=False)
    rendezvous: str | None
    interface: str | None
    ports: tuple[int, int] | None
    job: str
    patience_s: float
    absent: str
    secret: bytes = field(repr=False)
    wire_timeout_s: float
    call: CallFolder | None = None


class HostsLoop(Job):
    """The part of a job on several hosts that serves the connections.

    The arguments are those of `HostsJob`.
    """

    def __init__(
        self,
        sessions: HostSessions,
        task: HostsTask,
        options: JobOptions,
        number: int,
        listener: ControlListener | None = None,
    ) -> None:
        super().__init__([], options.log_dir, options.grace_s)
        self._sessions, self._task, self._options, self._number = sessions, task, options, number
        self._listener = listener
        self._host_of: list[HostSession] = []  # rank -> its host
        self._lost: dict[int, set[int]] = {}  # rank -> ranks that it has lost
        self._ended: list[JobProcess] = []  # ranks whose end was reported since the last look
        self._news: set[str] = set()
        self._said: set[str] = set()
        self._signal_counts = SignalCounts()
        self._outcomes: dict[int, bytearray] = {}  # rank -> what has arrived of its outcome
        self._stdin = None if options.stdin_rank is None else _StdinReader(options.stdin_rank, number)
        self._recorder = JobRecorder(None, 0, ())  # the start's own, once all hosts are ready
        self._began_s = time.monotonic()
        self._is_waiting = False  # the ranks have not been started
        self._is_ending = False

    @property
    def _silence_s(self) -> float:
        """How long an agent and this process may hear nothing of each other."""
        return SILENT_S

    def _send_plan(self, session: HostSession) -> None:
        # An agent that shows its output has a task of its own. Its connection can be read on the way, so neither the
        # secret nor the environment may travel over it.
        session.send(
            plan={
                **({} if session.shows_itself else self._task.sent),
                "name": session.name,
                "ranks": session.slots,
                "interface": self._task.interface,
                "ports": self._task.ports,
                "is_met": len(self._sessions.all) > 1 or self._options.max_ranks is not None,
                "calls": self._task.call is not None,
                "silence_s": self._silence_s,
            },
            start=self._number,
        )
        if session.link is not None:
            session.link.patience_s = self._silence_s
        if self._task.call is not None and session.link is not None:
            session.link.send_pieces(self._number, 0, CALL, self._task.call.content)

    def _greet(self, session: HostSession, message: Message) -> None:
        hello = message["hello"]
        _check_versions(session.name, hello, self._task.sent["python"])
        nodes = len(self._sessions.all)
        if hello.get("nodes", nodes) != nodes:
            raise LaunchError(
                f"{session.name} ({hello.get('host')}) was started with --nodes {hello['nodes']}, and node 0 with "
                f"--nodes {nodes}: want the same number on every node"
            )
        if "host" in hello:  # an agent that has come by itself
            session.ranks, session.host = hello.get("ranks", session.ranks), hello["host"]
            session.name = f"node {session.index} ({session.host})"
        session.take_hello(hello)
        self._send_plan(session)

    def _watch_more(self, poll: selectors.BaseSelector) -> None:
        self._sessions.watch(poll, reads=not (self._out.is_full or self._err.is_full))
        if self._listener is not None:
            self._listener.watch(poll)
        if self._stdin is not None and self._members:
            self._stdin.watch(poll, self._host_of[self._stdin.rank])

    def _wake_at(self) -> float | None:
        # The loop looks for ends before it hears of them: without a turn at once they would wait for the next message.
        return time.monotonic() if self._ended else self._sessions.wake_at

    def _wait_for_reader(self) -> None:
        self._poll(self._wake_at())  # the agents must hear from this process meanwhile
        self._do_more()

    def _do_more(self) -> None:
        self._recorder.look(self._members)
        for session in self._sessions.all:
            link = session.link
            if link is None:
                continue
            while (message := link.next_message()) is not None:
                self._hear(session, message)
            link.ping_if_due()
            if link.has_fallen_silent:
                link.close(f"it has sent nothing for {link.patience_s:g} s")
            if session.is_lost:
                self._on_lost_host(session)
        self._sessions.end_processes()
        # A lost agent's place is free only now, after its loss was heard.
        for node, new in [] if self._listener is None else self._listener.take():
            self._sessions.seat(node, new)
        now = time.monotonic()
        if self._settle_until is not None and now >= self._settle_until and self._may_hear_the_cause():
            self._settle_until = now + _AGAIN_S

    def _may_hear_the_cause(self) -> bool:
        """Return whether the loss of a host may still explain the failures."""
        # A rank may report a loss long before the launcher counts the lost rank's host as dead.
        lost = [self._lost_by(member) for member in self._failed]
        named = set(self._members) if None in lost else set().union(*(each for each in lost if each is not None))
        links = [
            host.link
            for member, host in zip(self._members, self._host_of, strict=True)
            if member in named and member.code is None
        ]
        return any(link is not None and (not link.is_open or link.is_quiet(QUIET_S)) for link in links)

    def _hear(self, session: HostSession, message: Message | StreamData) -> None:
        # What an agent says of an earlier start comes late if that start's end was not waited for.
        start = message.start if isinstance(message, StreamData) else message.get("start")
        if start not in (None, self._number):
            return
        if isinstance(message, StreamData):
            if message.stream == OUTCOME:
                self._outcomes.setdefault(message.rank, bytearray()).extend(message.data)
                return
            if message.rank >= len(self._members):
                return
            member = self._members[message.rank]
            output = member.out if message.stream == STDOUT else member.err
            if isinstance(output, ShownOutput):
                output.take(message.data)
            return
        self._handlers()[next(iter(message))](session, message)

    def _handlers(self) -> dict[str, Callable[[HostSession, Message], None]]:
        """Return what to do with each kind of message."""
        return {
            "hello": self._greet,
            "ready": self._on_ready,
            "pids": self._on_pids,
            "ended": self._on_end,
            "lost": self._on_loss,
            "news": lambda _, told: self._news.add(told["news"]),
            "say": self._on_word,
            "read": self._on_read,
            "steps": self._on_steps,
            "signal": self._on_signal_elsewhere,
            "over": self._on_over,
            "error": self._on_error,
        }

    def _on_ready(self, session: HostSession, message: Message) -> None:
        session.ready = message["ready"]
        if session.is_opened_here:
            _check_apart(session, self._sessions.all)

    def _on_pids(self, _session: HostSession, message: Message) -> None:
        for rank, pid in message["pids"].items():
            if int(rank) < len(self._members):
                self._members[int(rank)].known_as = pid

    def _on_loss(self, _session: HostSession, message: Message) -> None:
        rank, lost = message["lost"]
        self._lost.setdefault(rank, set()).add(lost)

    def _on_steps(self, _session: HostSession, message: Message) -> None:
        rank, told = message["steps"]
        report = report_in(told)
        if report is not None and rank < len(self._members):
            self._recorder.take(rank, report)

    def _on_read(self, _session: HostSession, message: Message) -> None:
        if self._stdin is not None:
            self._stdin.unread_bytes -= message["read"]

    def _on_over(self, session: HostSession, _message: Message) -> None:
        session.is_over = True

    def _on_error(self, session: HostSession, message: Message) -> None:
        for member, host in zip(self._members, self._host_of, strict=True):
            if host is session and member.code is None:  # the agent has ended those of its ranks that it had started
                member.set_code(-signal.SIGKILL)
        if not self._is_ending:
            text = f"{session.name}: {message['error']}"
            raise LaunchError(text) if message["code"] is None else CommandError(text, message["code"])

    def _on_end(self, _session: HostSession, message: Message) -> None:
        member = self._members[message["ended"]] if message["ended"] < len(self._members) else None
        if member is not None and member.code is None:
            self._record_end(member, message["code"])
            if self._task.call is not None:
                self._task.call.take(message["ended"], bytes(self._outcomes.pop(message["ended"], b"")))
            member.told_of_memory = message["memory"]
            if isinstance(member.err, ToldLines):
                member.err.last_lines = [line.encode() for line in message["lines"]]

    def _record_end(self, member: JobProcess, code: int) -> None:
        member.set_code(code)
        self._ended.append(member)

    def _on_word(self, session: HostSession, message: Message) -> None:
        text = message["say"]
        if text not in self._said:  # most words are the same on every host
            self._said.add(text)
            self._say(f"{session.name}: {text}")

    def _on_signal_elsewhere(self, session: HostSession, message: Message) -> None:
        if self._signal_counts.is_new(message["signal"], session.index):
            self.was_stopped |= message["signal"] not in PASSED_ON  # also if a failure is stopping the job
            super()._on_signal(message["signal"])

    def _on_signal(self, number: int) -> None:
        if self._signal_counts.is_new(number, None):
            super()._on_signal(number)

    def _on_lost_host(self, session: HostSession) -> None:
        """Treat the ranks of a host whose agent is gone as failed.

        Raises:
            LaunchError: the job has not begun there.
        """
        reason = session.reason()
        was_over = session.is_over
        self._sessions.lose(session)
        if self._is_waiting and not self._is_ending:
            raise LaunchError(f"{session.name}: no agent runs there: {reason}")
        for member, host in zip(self._members, self._host_of, strict=True):
            if host is session and member.code is None:
                self._record_end(member, -signal.SIGKILL)
                member.told_ending = f"its host was lost: {reason}"
        if not was_over and self._running():
            self._say(f"{session.name} was lost: {reason}")


def _check_versions(name: str, hello: Message, python: str) -> None:
    """Raise LaunchError unless the agent of host `name` has this multiring and the Python version `python`."""
    found = f"multiring {hello.get('version')} on Python {hello.get('python')}"
    wanted = f"multiring {VERSION} on Python {python}"
    if found != wanted:
        raise LaunchError(f"{name} has {found}, and this host has {wanted}: install one version everywhere")


def _check_apart(session: HostSession, others: Sequence[HostSession]) -> None:
    """Raise LaunchError if the host of `session` is in the job under another name, too.

    Two agents of one host would give their ranks the same cores and local ranks. Each node of --nodes is started by the
    user, who may want several on one host.
    """
    for other in others:
        is_same = other.is_opened_here and (other.ready or {}).get("host_id") == (session.ready or {})["host_id"]
        if other is not session and is_same:
            first, second = sorted((session, other), key=lambda each: each.index)
            raise LaunchError(
                f"{first.name} and {second.name} are one host: want one name for it, as in "
                f"--hosts {first.name}:{first.ranks + second.ranks}"
            )
