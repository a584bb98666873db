"""The launcher's part in the votes on who goes on: it keeps the ranks' votes, tells who ended, and is the referee.

A process is told to have ended only once the kernel says that it has: then it can send nothing more, and all that it
has sent to the launcher is here. A process that the others have gone on without is killed, because it may still write
into their memory. The messages are in `launcher_channel`.
"""

import hmac
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from multiring._agreement.referee import Referee
from multiring._agreement.vote_messages import decode
from multiring._launch.local_point import LocalClient, LocalPoint
from multiring._runtime.failures.launcher_channel import (
    ALIVE,
    ASKS_FOR_END,
    BYE,
    CANNOT_GO_ON,
    ENDED,
    FAILED,
    FAR,
    GIVE_UP,
    HELLO,
    JOB_ENDS,
    KEEP,
    LEFT,
    REFEREE_SAYS,
    UNKNOWN,
    VOTE,
    WATCHED,
    LauncherMessage,
    proof_of,
)

_GRACE_S = 2.0  # a process that others have seen dying is dead by then


@dataclass(eq=False, slots=True)
class _Voter(LocalClient):
    """A rank; its number is its rank at the start."""

    vote: bytes = b""  # the last one kept
    has_left: bool = False  # in order
    has_failed: bool = False  # it ends by an error, and has closed all connections already

    @property
    def is_silent(self) -> bool:
        """Whether the process sends nothing more, and writes no other rank's memory."""
        return self.has_left or self.has_failed or self.has_ended


class VotePoint(LocalPoint[_Voter]):
    """Where the ranks of one job meet their launcher for votes.

    Args:
        address: the address of an abstract socket; None if the ranks come by the agents of their hosts.
        secret: the job's secret.
        job: the job's name.
        names: the ranks in messages, by rank.
        say: shows a message.
    """

    def __init__(
        self, address: str | None, secret: bytes, job: str, names: Sequence[str], say: Callable[[str], None]
    ) -> None:
        super().__init__(address, _Voter)
        self._secret, self._job, self._names, self._say = secret, job, tuple(names), say
        self._ranks: dict[int, _Voter] = {}
        self._referee = Referee()
        self.generation = 0
        self._members: tuple[int, ...] = tuple(range(len(names)))
        self._doomed: dict[int, float] = {}  # ranks that are out -> when to kill their processes
        self._killed: set[int] = set()
        self.job_ends = False  # whether ranks that have got SIGTERM are to end at once
        self.given_up = ""  # why a rank cannot go on; empty if all can

    @property
    def is_complete(self) -> bool:
        """Whether every rank has come, so that the others can go on without any."""
        return len(self._ranks) == len(self._names) and all(each.is_watched for each in self._ranks.values())

    def has_left(self, rank: int) -> bool:
        """Return whether the rank has left the job in order."""
        return rank in self._ranks and self._ranks[rank].has_left

    def is_out(self, rank: int) -> bool:
        """Return whether the others have gone on without the rank."""
        return rank not in self._members

    def has_killed(self, rank: int) -> bool:
        """Return whether this object killed the rank's process, since the others have gone on without it."""
        return rank in self._killed

    def kill(self, rank: int) -> None:
        """Kill what may be left of a rank: its process, if the one that the launcher started was another."""
        voter = self._ranks.get(rank)
        if voter is not None:
            self._kill(voter)

    def tell_end(self, why: str) -> None:
        """Tell the ranks that they cannot go on; one that waits for an unreachable rank would learn it too late."""
        for each in self._ranks.values():
            if each.is_watched and not each.is_silent:
                self._send(each, f"{CANNOT_GO_ON} {why}".encode())

    @property
    def acts_at(self) -> float | None:
        """The monotonic time at which `act` must be called; None if nothing is to be done."""
        return min(self._doomed.values(), default=None)

    def act(self) -> None:
        """Kill the processes without which the others have gone on."""
        for rank, at in list(self._doomed.items()):
            voter = self._ranks[rank]
            if voter.is_silent:
                del self._doomed[rank]
            elif time.monotonic() >= at:
                del self._doomed[rank]
                self._killed.add(rank)
                self._say(
                    f"{self._names[rank]} (pid {voter.pid}) has not answered the others, which went on without it: it "
                    "is killed, because it could still write into their memory"
                )
                self.kill(rank)

    # ---- what comes ----

    def _take(self, voter: _Voter, line: LauncherMessage) -> None:
        if voter.number is None:
            self._admit(voter, line)
        elif line.kind == ALIVE:
            self._catch_up(voter)
        elif line.kind == KEEP:
            self._keep(voter, line.rest)
        elif line.kind == VOTE:
            self._judge(voter.number, line.rest)
        elif line.kind == ASKS_FOR_END and self.job_ends:
            self._send(voter, JOB_ENDS.encode())
        elif line.kind == GIVE_UP:
            self.given_up = (
                self.given_up or f"{self._names[voter.number]} gives up: {line.rest.decode(errors='replace')}"
            )
        elif line.kind in (BYE, FAILED):
            voter.has_left, voter.has_failed = line.kind == BYE, line.kind == FAILED
            self._tell_all(voter)

    def _judge(self, rank: int, message: bytes) -> None:
        for to, data in self._referee.hear(rank, message).sends:
            if to in self._ranks:
                self._send(self._ranks[to], f"{REFEREE_SAYS} ".encode() + data)

    def _admit(self, voter: _Voter, line: LauncherMessage) -> None:
        wanted = proof_of(self._secret, self._job, line.rank)
        is_right = line.kind == HELLO and hmac.compare_digest(line.rest, wanted.encode())
        if not is_right or not 0 <= line.rank < len(self._names) or line.rank in self._ranks:
            self._drop(voter)  # a number stands for one process for good
            return
        self._know(voter, line.rank)
        self._ranks[line.rank] = voter
        # Its answer comes after the line above, so the descriptor is not that of a later process with the same ID.
        self._send(voter, (WATCHED if voter.relay is None else f"{WATCHED} {FAR}").encode())

    def _catch_up(self, voter: _Voter) -> None:
        voter.is_watched = True
        for each in self._ranks.values():
            if each is not voter and each.is_silent:
                self._send(voter, _end_of(each))

    def _keep(self, voter: _Voter, kept: bytes) -> None:
        vote = decode(kept).vote
        voter.vote = kept
        if voter.relay is not None:
            self._send(voter, KEEP.encode())
        if vote.generation <= self.generation:
            return
        self._members = vote.members
        self.generation = vote.generation  # it is decided: nobody votes in a generation that is not
        for rank, each in self._ranks.items():
            if rank not in vote.members and not each.is_silent:
                self._doomed.setdefault(rank, time.monotonic() + _GRACE_S)

    def _see_end(self, voter: _Voter) -> None:
        if voter.is_watched and not (voter.has_left or voter.has_failed):
            self._tell_all(voter)

    def _tell_all(self, gone: _Voter) -> None:
        for each in self._ranks.values():
            if each is not gone and each.is_watched:
                self._send(each, _end_of(gone))


def _end_of(voter: _Voter) -> bytes:
    kind = LEFT if voter.has_left else ENDED
    return f"{kind} {voter.number} ".encode() + (UNKNOWN if voter.is_unsure else voter.vote)
