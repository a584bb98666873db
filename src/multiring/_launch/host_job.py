"""The ranks of one host of a job, started by the agent of the host on behalf of the launcher.

The agent decides nothing. It starts the ranks, passes their output and their ends to the launcher, and obeys the
launcher's commands. Only if it loses the launcher, it ends the ranks by itself.
"""

import contextlib
import os
import selectors
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

from multiring._launch.client_relay import INTAKE, ClientRelays, name_of_newcomer, votes_of
from multiring._launch.control_link import OUTCOME, STDERR, STDIN, STDOUT, ControlLink, StreamData, secret_of_start
from multiring._launch.job import JobOptions
from multiring._launch.job_process import JobProcess, Start
from multiring._launch.local_job import LocalJob
from multiring._launch.output import ShownOutput, Tagger, Untagged
from multiring._launch.pickled_call import CallFiles
from multiring._launch.rank_starts import HostPlace, Newcomer, newcomer_start
from multiring._runtime.bootstrap.handshake import Message
from multiring._settings import intake_address, vote_address

_PIPE_BYTES = 4096
_LOST_CODE = 128 + signal.SIGTERM


class _LinkSink:
    """Sends one standard stream of a rank to the launcher."""

    def __init__(self, link: ControlLink, start: int, rank: int, stream: int) -> None:
        self._link, self._start, self._rank, self._stream = link, start, rank, stream

    @property
    def is_full(self) -> bool:
        return self._link.is_full

    def add(self, data: bytes, tagger: Tagger | None = None) -> None:
        del tagger
        if data:
            self._link.send_stream(self._start, self._rank, self._stream, data)


class StdinPipe:
    """The standard input of a rank in start number `start`, which comes from the launcher."""

    def __init__(self, link: ControlLink, start: int) -> None:
        self._link, self._start = link, start
        self._queue = bytearray()
        self._has_ended = False
        self.reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)

    def take(self, data: bytes) -> None:
        """Queue data for the rank; no data mean the end of the input."""
        self._queue += data
        self._has_ended |= not data
        self._close_at_end()

    def watch(self, poll: selectors.BaseSelector) -> None:
        """Register the pipe with `poll` if it has data to write."""
        if self._queue and self._writing >= 0:
            poll.register(self._writing, selectors.EVENT_WRITE, self._write_some)

    def close(self) -> None:
        """Close the pipe. A second call has no effect."""
        for descriptor in (self.reading, self._writing):
            if descriptor >= 0:
                os.close(descriptor)
        self.reading = self._writing = -1

    def _write_some(self) -> None:
        try:
            count = os.write(self._writing, self._queue[:_PIPE_BYTES])
        except BlockingIOError:
            return
        except OSError:  # the rank does not read any more
            self._queue.clear()
            return
        del self._queue[:count]
        self._link.send(read=count, start=self._start)
        self._close_at_end()

    def _close_at_end(self) -> None:
        if self._has_ended and not self._queue and self._writing >= 0:
            os.close(self._writing)
            self._writing = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class HostTask:
    """What the ranks of one host run.

    - relays: the launcher shows the ranks' output. Otherwise the agent shows it.
    - calls: the files of each rank's call, if the ranks call a function.
    """

    command: tuple[str, ...]
    environment: dict[str, str] = field(repr=False)
    options: JobOptions
    secret: bytes = field(repr=False)
    relays: bool
    calls: tuple[CallFiles, ...] = ()


class HostJob(LocalJob):
    """One start of the ranks of a host.

    Args:
        link: the connection to the launcher.
        place: the host's place in the job.
        starts: the ranks of the host.
        task: what the ranks run.
        said: messages about what the ranks share.
        stdin: the standard input of the rank that has one.
    """

    def __init__(
        self,
        link: ControlLink,
        place: HostPlace,
        starts: Sequence[Start],
        task: HostTask,
        said: Sequence[str],
        stdin: StdinPipe | None,
    ) -> None:
        super().__init__(place.job, starts, task.options, place.reports, said)
        self._link = link
        self._place = place
        self._relays = task.relays
        self._stdin = stdin
        self._calls = task.calls
        self._is_ended = False  # the launcher has ended the job, or is lost
        self._numbers = list(place.ranks)  # the processes' numbers in the job
        self._task = task
        self._processes: ClientRelays | None = None
        self._told: set[int] = set()  # the ranks whose end was reported
        self._told_lost: set[tuple[int, int]] = set()
        self._told_news: set[bytes] = set()
        self._leftovers_s: float | None = None  # how long leftover processes may take to end

    # -- what differs from a job of one host

    def _open(self, stack: contextlib.ExitStack) -> None:
        super()._open(stack)
        if self._stdin is not None:
            stack.callback(self._stdin.close)
        if self._task.options.min_ranks is not None:
            self._processes = ClientRelays(self._report, self._task.secret)
            stack.callback(self._processes.close)
            self._processes.open(votes_of(0), vote_address(self._place.reports))
            self._processes.open(INTAKE, intake_address(self._place.reports))

    def _outputs(self, start: Start, logs: Sequence[BinaryIO | None]) -> tuple[ShownOutput, ShownOutput]:
        if not self._relays:
            return super()._outputs(start, logs)
        rank = self._numbers[len(self._members)]
        out, err = (_LinkSink(self._link, self._place.start, rank, stream) for stream in (STDOUT, STDERR))
        return ShownOutput(Untagged(), out, None), ShownOutput(Untagged(), err, None)

    def _start_all(self) -> None:
        super()._start_all()
        self._report(pids={str(self._rank_of(member)): member.pid for member in self._members})

    def _goes_on(self) -> bool:
        return super()._goes_on() or not self._is_ended

    def _judge(self) -> None:
        """Do nothing, because the launcher decides what a failure means."""

    def _on_signal(self, number: int) -> None:
        """Report a signal to the launcher, which decides for all hosts."""
        if self._link.is_open:
            self._link.send(signal=number)
        else:
            super()._on_signal(number)

    def _say(self, text: str) -> None:
        if not self._relays:
            super()._say(text)
        elif self._link.is_open:
            self._link.send(say=text)

    def _conclude(self) -> None:
        """Do nothing, because the launcher speaks about the job as a whole."""

    # -- the connection

    def _watch_more(self, poll: selectors.BaseSelector) -> None:
        super()._watch_more(poll)
        self._link.watch(poll)
        if self._processes is not None:
            self._processes.watch(poll)
        if self._stdin is not None:
            self._stdin.watch(poll)

    def _wake_at(self) -> float | None:
        return self._link.wake_at if self._link.is_open else None

    def _wait_for_reader(self) -> None:
        self._poll(self._wake_at())  # the launcher must hear from this process meanwhile
        self._do_more()

    def _do_more(self) -> None:
        super()._do_more()
        self._tell()
        # What follows the end of this start belongs to the next one.
        while not self._is_ended and (message := self._link.next_message()) is not None:
            self._obey(message)
        self._link.ping_if_due()
        if self._link.has_fallen_silent:
            self._link.close("it sends nothing any more")
        if not self._link.is_open and not self._is_ended:
            self._is_ended = True
            self._say(f"the launcher was lost: {self._link.failure}")
            if self._processes is not None:
                self._processes.close()  # the ranks learn that they cannot vote any more
            if self._running():
                self._stop(_LOST_CODE)

    def _take_steps(self) -> None:
        """Pass on what the ranks have reported of their steps, unless the launcher is slow to read."""
        for first, report in self._reports.take_steps().items():
            for member in self._members:
                if member.pid == first and not self._link.is_full:
                    self._report(steps=[self._rank_of(member), report.to_json()])

    def _tell(self) -> None:
        """Report news, losses and ends to the launcher."""
        for words in self._reports.news - self._told_news:
            self._told_news.add(words)
            self._report(news=words.decode())
        for member in self._members:
            rank = self._rank_of(member)
            for lost in self._reports.ranks_lost_by(member.pid):
                if (rank, lost) not in self._told_lost:
                    self._told_lost.add((rank, lost))
                    self._report(lost=[rank, lost])
            if member.code is not None and rank not in self._told:
                self._told.add(rank)
                if self._calls:
                    written = self._calls[self._members.index(member)].written()
                    self._link.send_pieces(self._place.start, rank, OUTCOME, written)
                lines = [line.decode("utf-8", "replace") for line in member.err.last_lines]
                self._report(ended=rank, code=member.code, lines=lines, memory=self._memory.told_of(member))

    def _report(self, **message: object) -> None:
        """Send a message about this start. The launcher drops it once it has begun another start."""
        self._link.send(**message, start=self._place.start)

    def _obey(self, message: Message | StreamData) -> None:
        if isinstance(message, StreamData):
            if self._stdin is not None and (message.start, message.stream) == (self._place.start, STDIN):
                self._stdin.take(message.data)
        elif "signal" in message:
            wanted = set(message["ranks"])
            for member in self._running():
                if self._rank_of(member) in wanted:
                    self._signal(member, message["signal"])
        elif "pass_on" in message:
            self._pass_on(message["pass_on"])
        elif "stop_leftovers" in message:
            self._stop_leftovers({member.pid for member in self._running()})
        elif "say" in message:
            self._say(message["say"])
        elif "end" in message:
            self._is_ended = True
            self._leftovers_s = message["end"]
        else:
            self._obey_of_elastic(message)

    def _obey_of_elastic(self, message: Message) -> None:
        if "relay" in message and self._processes is not None:
            self._processes.obey(message)
        elif "newcomer" in message:
            self._start_newcomer(message["newcomer"], message["local"], message["slots"])

    def _end_leftovers(self, grace_s: float) -> None:
        super()._end_leftovers(grace_s if self._leftovers_s is None else self._leftovers_s)

    def _rank_of(self, member: JobProcess) -> int:
        return self._numbers[self._members.index(member)]

    def _start_newcomer(self, number: int, local: int, slots: int) -> None:
        job = name_of_newcomer(self._place.job, number)
        newcomer = Newcomer(
            number=number, local=local, slots=slots, job=job, secret=secret_of_start(self._task.secret, job)
        )
        task = self._task
        start = newcomer_start(task.command, self._place, task.options, task.environment, newcomer)
        self._numbers.append(number)
        try:
            member = self._start(start)
        except OSError as error:
            self._numbers.pop()
            self._report(ended=number, code=1, lines=[f"it cannot be started: {error.strerror}"], memory="")
            return
        self._members.append(member)
        self._born(member)
        self._report(pids={str(number): member.pid})
