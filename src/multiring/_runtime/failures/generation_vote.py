"""This rank's part in the vote on the next generation: `Succession`, with its messages, its clock and its kept vote.

Votes travel as control messages between the ranks. The launcher keeps each rank's vote, tells who ended, and is the
referee (launcher_channel.py). The control thread and a thread of this module answer, so a rank whose program computes
votes like any other.
"""

import hashlib
import itertools
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from multiring._agreement.succession import Succession, VoteOutcome
from multiring._agreement.vote_messages import PROMISE, VoteMessage, decode, encode
from multiring._agreement.votes import REFEREE, Vote
from multiring._limits.processes import start_thread
from multiring._native import NOTE_BYTES, ControlMessage, ControlMessageKind
from multiring._runtime.failures.computing_processes import ComputingProcesses
from multiring._runtime.failures.control_thread import Control
from multiring._runtime.failures.launcher_channel import (
    ASKS_FOR_END,
    BYE,
    CANNOT_GO_ON,
    ENDED,
    FAILED,
    GIVE_UP,
    JOB_ENDS,
    KEEP,
    LEFT,
    REFEREE_SAYS,
    UNKNOWN,
    VOTE,
    LauncherChannel,
    LauncherMessage,
)
from multiring._runtime.group.generation_end import GenerationEnd
from multiring.errors import StateError

_log = logging.getLogger("multiring")
TICK_S = 2.0  # an answer takes a millisecond; a rank in code that holds Python's global lock takes longer
COMPUTING_S = 40.0  # how long the vote waits for a rank that does not answer, but computes
MOST_S = 100.0  # how long a decision and the ends of those that it leaves out may take
_WITHDRAW_S = 10.0  # how long a rank that leaves waits for the others' decision
_SLICE_S = 0.2  # the longest time between two checks for Ctrl-C


@dataclass(frozen=True, slots=True)
class VotingProcesses:
    """Where the processes of generation 0 are.

    - pids: by number, in the order of ranks, the process ID; None on another host.
    - hosts: by host, the numbers of its processes.
    """

    pids: Mapping[int, int | None]
    hosts: Sequence[Sequence[int]]


class _MessageParts:
    """Puts the parts of other ranks' messages together."""

    def __init__(self) -> None:
        self._begun: dict[int, tuple[int, list[bytes]]] = {}  # sender -> the number of its message, and the parts

    def add(self, part: ControlMessage) -> bytes | None:
        """Return the message if this is its last part and no part is lost."""
        number, index, has_more = part.tag >> 32, part.tag >> 1 & 0x7FFFFFFF, part.tag & 1
        known, parts = self._begun.get(part.rank, (-1, []))
        if index == 0:
            known, parts = number, []
        if known != number or index != len(parts):
            return None  # an earlier part is lost
        parts.append(part.payload)
        self._begun[part.rank] = known, parts
        if has_more:
            return None
        del self._begun[part.rank]
        return b"".join(parts)


class GenerationVote:
    """Decides with the other ranks which of them go on.

    Args:
        control: sends the votes.
        channel: the channel to the launcher.
        processes: the processes of generation 0.
        end: the end of generation 0.
        job: the job's name.
        least: fewer ranks do not go on.
    """

    def __init__(
        self,
        control: Control,
        channel: LauncherChannel,
        processes: VotingProcesses,
        end: GenerationEnd,
        job: str,
        least: int,
    ) -> None:
        members = tuple(processes.pids)
        self._control, self._channel, self._least = control, channel, least
        self._own = end.rank
        self._succession = Succession(self._own, 0, members, least=least, has_referee=True)
        self._end = end
        pids_here = {number: pid for number, pid in processes.pids.items() if pid is not None}
        self._here, self._hosts = frozenset(pids_here), processes.hosts
        self._computing = ComputingProcesses(pids_here)
        self._patience_s = COMPUTING_S
        self._changed = threading.Condition(threading.RLock())
        self._decided: tuple[int, tuple[int, ...]] = (0, members)
        self._ended: set[int] = set()  # whose processes ended, or have left
        self._left: dict[int, Vote | None] = {}  # who has left, and did not matter so far
        self._why = ""  # why this rank takes part in no vote any more
        self._asks_for_end = False  # SIGTERM has come, and the launcher is to be asked why
        self.job_ends = False  # the launcher has said so
        self._cannot = ""  # why the ranks that are left cannot go on, in the launcher's words
        self._is_cut_off = False  # the launcher does not answer
        self._group = int.from_bytes(hashlib.blake2b(f"vote|{job}".encode(), digest_size=8).digest(), "little")
        self._kept = self._confirmed = 0  # votes that were sent to the launcher, and that it has
        self._held: deque[tuple[int, VoteOutcome]] = deque()  # what waits until so many votes are with the launcher
        self._numbers = itertools.count()
        self._parts = _MessageParts()
        self._thread = threading.Thread(target=self._run, name="multiring votes", daemon=True)

    def start(self) -> None:
        """Take part in votes from now on."""
        self._control.add(self._group, self)
        self._control.when_cut_off(self._doubt_host)
        start_thread(self._thread, "this rank cannot start its thread for votes")

    def watch(self, end: GenerationEnd, number: int) -> None:
        """End `end`, the end of generation `number`, once a later generation is decided."""
        with self._changed:
            self._end = end
            why = self._cannot or (self._told() if self._decided[0] > number else "")
        if why:
            end.finish(why)

    def succeed(self, number: int, members: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """Wait for a decision that follows generation `number`; return the new generation and its members.

        All processes of this host that it leaves out have ended, or have left, when the call returns: they could write
        into this process's memory. Those of other hosts may still run. What they send is of an ended generation.

        Args:
            number: the generation's number.
            members: the numbers of its processes, by rank.

        Raises:
            StateError: the ranks that are left cannot go on, or have gone on without this one.
        """
        if self._decided[0] <= number:
            self._do(self._begin)
        until_s = time.monotonic() + MOST_S
        with self._changed:
            while (found := self._found(number, members)) is None:
                if time.monotonic() >= until_s:
                    why = self._missing(number, members)
                    self._say(f"{GIVE_UP} {why}".encode())
                    raise StateError(why)
                self._changed.wait(_SLICE_S)
            return found

    def ask_for_end(self) -> None:
        """Ask the launcher whether the job ends; if so, set `job_ends` and send this process SIGTERM once more.

        A handler of signals may call it.
        """
        self._asks_for_end = True
        self._channel.wake()

    def withdraw(self) -> None:
        """Have the others go on without this rank, and wait until they have decided it, but not for long.

        Without a decision, for example because too few would be left, the end of this process is a loss like others.
        """
        self._do(self._succession.leave)
        until_s = time.monotonic() + _WITHDRAW_S
        with self._changed:
            while not self._why and self._own in self._decided[1] and time.monotonic() < until_s:
                self._changed.wait(_SLICE_S)

    def leave(self, *, in_order: bool) -> None:
        """Take part in no vote any more, and tell the launcher.

        The native context must be closed already: this rank sends nothing more, and writes no other rank's memory.

        Args:
            in_order: whether the rank has done its part. Otherwise the others go on without it.
        """
        with self._changed:
            self._stop("this rank has left the job")
            if not self._is_cut_off:
                self._say((BYE if in_order else FAILED).encode())
        self._channel.close()

    # ---- the control thread's listener ----

    def hear(self, notice: ControlMessage) -> None:
        """Handle a part of another rank's message."""
        if notice.kind is not ControlMessageKind.MESSAGE:
            return
        with self._changed:
            data = self._parts.add(notice)
        if data is not None:
            self._do(lambda: self._with_left(self._succession.hear(notice.rank, data)))

    def has_come(self, name: str) -> bool:  # noqa: ARG002 -- part of the interface
        """Return False: votes have no names."""
        return False

    def lose(self, rank: int, *, died: bool, why: str) -> None:  # noqa: ARG002 -- part of the interface
        """Begin a vote if a rank died. A rank that left in order is missed by those that wait for it only."""
        if died:
            self._do(lambda: self._succession.cut(rank))
        else:
            with self._changed:
                self._left.setdefault(rank, None)

    def _doubt_host(self, rank: int) -> None:
        """Do not wait for votes of a host that cannot be reached, also of its ranks without a connection here."""
        mates = next((set(numbers) for numbers in self._hosts if rank in numbers), set())
        self._do(lambda: self._succession.doubt(mates - {rank}))

    def end(self) -> None:
        """Take part in no vote any more, because this rank leaves the job."""
        with self._changed:
            self._stop("multiring was shut down")

    # ---- events ----

    def _run(self) -> None:
        for message in self._channel.first_messages:
            self._hear_launcher(message)
        next_s = time.monotonic() + TICK_S
        while True:
            try:
                messages = self._channel.receive(max(0.0, next_s - time.monotonic()))
            except (OSError, ValueError) as error:
                if not self._is_stopped():  # else this rank has closed the channel
                    _log.warning("a message of the launcher was not understood: %s", error)
                messages = None
            with self._changed:
                if messages is None:
                    self._stop("the launcher does not answer any more")
                if self._why:
                    return
            for message in messages or ():
                self._hear_launcher(message)
            if self._asks_for_end:
                self._asks_for_end = False
                with self._changed:
                    self._say(ASKS_FOR_END.encode())
            if time.monotonic() >= next_s:
                next_s = time.monotonic() + TICK_S
                self._do(self._tick)

    def _hear_launcher(self, message: LauncherMessage) -> None:
        if message.kind == REFEREE_SAYS:
            self._do(lambda: self._succession.hear(REFEREE, message.rest))
        elif message.kind == KEEP:
            self._confirmed += 1
            self._do(VoteOutcome)
        elif message.kind == JOB_ENDS:
            self.job_ends = True
            os.kill(os.getpid(), signal.SIGTERM)
        elif message.kind == CANNOT_GO_ON:
            # An operation would wait for an unreachable rank longer than the job lasts. `watch` sets before it reads.
            self._cannot = f"{message.rest.decode(errors='replace')}. Save the state, and start the job again"
            self._end.finish(self._cannot)
        elif message.kind in (ENDED, LEFT):
            vote = None if message.rest == UNKNOWN else decode(message.rest).vote if message.rest else Vote(-1)
            with self._changed:
                self._ended.add(message.rank)
                self._changed.notify_all()
                if message.kind == LEFT:
                    self._left[message.rank] = vote
                    return
                self._left.pop(message.rank, None)
            self._do(lambda: self._succession.end(message.rank, vote))

    def _tick(self) -> VoteOutcome:
        """Count the time, unless a rank whose answer is missing computes.

        It may hold Python's global lock in an extension, and then answers later.
        """
        awaited = self._succession.awaited
        computes = self._computing.any_of(awaited)
        if not awaited:
            self._patience_s = COMPUTING_S
        elif computes and self._patience_s > 0:
            self._patience_s -= TICK_S
            return VoteOutcome()
        return self._succession.tick()

    def _begin(self) -> VoteOutcome:
        return self._with_left(self._succession.begin())

    def _with_left(self, outcome: VoteOutcome) -> VoteOutcome:
        """Tell the succession who has left, now that there is a vote."""
        if self._succession.is_voting:
            for rank, vote in self._left.items():
                more = self._succession.cut(rank) if vote is None else self._succession.end(rank, vote)
                outcome = VoteOutcome(
                    more.vote or outcome.vote, outcome.sends + more.sends, outcome.generations + more.generations
                )
            self._left = {}
        return outcome

    def _do(self, event: Callable[[], VoteOutcome]) -> None:
        with self._changed:
            if self._why:
                return
            try:
                outcome = event()
            except ValueError as error:
                _log.warning("a vote was not understood: %s", error)
                return
            # The vote is kept before anybody hears of it, and before this rank goes by it.
            if outcome.vote is not None:
                kept = encode(VoteMessage(PROMISE, outcome.vote.generation, vote=outcome.vote))
                self._say(f"{KEEP} ".encode() + kept)
                self._kept += 1
            self._held.append((self._kept, outcome))
            before = self._decided
            self._let_go()
            if self._is_stopped() or self._decided == before:
                return
            end, why = self._end, self._told()
            self._changed.notify_all()
        end.finish(why)

    # ---- with the lock held ----

    def _let_go(self) -> None:
        """Go by the votes that the launcher has."""
        while self._held and (not self._channel.is_far or self._held[0][0] <= self._confirmed):
            _, outcome = self._held.popleft()
            for to, data in outcome.sends:
                self._send(to, data)
            if outcome.generations and not self._is_stopped():
                self._decided = outcome.generations[-1]

    def _is_stopped(self) -> bool:
        return bool(self._why)

    def _send(self, to: int, data: bytes) -> None:
        if self._why:
            return
        if to == REFEREE:
            self._say(f"{VOTE} ".encode() + data)
            return
        number, parts = next(self._numbers), [data[at : at + NOTE_BYTES] for at in range(0, len(data), NOTE_BYTES)]
        try:
            for index, part in enumerate(parts):
                self._control.send(to, self._group, number << 32 | index << 1 | (index < len(parts) - 1), part)
        except StateError as error:  # that rank accepts no messages at the moment; `tick` repeats this one
            _log.info("a vote was not sent to rank %d: %s", to, error)

    def _say(self, line: bytes) -> None:
        try:
            self._channel.send(line)
        except OSError as error:
            self._is_cut_off = True
            self._stop(f"the launcher does not answer any more ({error})")

    def _stop(self, why: str) -> None:
        if not self._why:
            self._why = why
            self._changed.notify_all()

    def _found(self, number: int, members: Sequence[int]) -> tuple[int, tuple[int, ...]] | None:
        if self._why:
            raise StateError(f"this rank cannot agree with others on who goes on: {self._why}")
        after, left = self._decided
        if after > number:
            if self._own not in left:
                raise StateError(self._told())
            return None if self._fenced(members, left) else self._decided
        if self._cannot or len(set(members) - self._ended) < self._least:
            raise StateError(self._cannot or self._missing(number, members))
        return None

    def _fenced(self, members: Sequence[int], left: Sequence[int]) -> set[int]:
        """Return the processes of this host that are out and have not ended."""
        return (set(members) - set(left)) & self._here - self._ended

    def _told(self) -> str:
        after, left = self._decided
        if self._own not in left:
            return (
                f"the other ranks have gone on as generation {after} without this one, process {self._own} of the "
                "job's start, because it did not answer. It must end"
            )
        return f"the ranks go on as generation {after}, processes {list(left)} of the job's start"

    def _missing(self, number: int, members: Sequence[int]) -> str:
        ended = sorted(set(members) & self._ended)
        left = [each for each in members if each not in self._ended]
        names = f"of generation {number}'s {len(members)} ranks, processes {list(members)} of the job's start"
        if len(left) < self._least:
            return (
                f"{names}, {ended} have ended. {len(left)} are left, and --min-ranks {self._least} wants more: save "
                "the state, and start the job again"
            )
        after, decided = self._decided
        if after > number:
            waits = sorted(self._fenced(members, decided))
            return f"processes {waits} are out and have not ended within {MOST_S:.0f} s, so their memory cannot be used"
        return (
            f"{names}, {ended} have ended, and the others found no majority within {MOST_S:.0f} s. More than half of "
            f"{left} must answer: look for stopped or unreachable processes among them"
        )
