"""The launcher's part in the votes on who goes on: it keeps the ranks' votes, tells who ended, and is the referee.

A process is told to have ended only once the kernel says that it has: then it can send nothing more, and all that it
has sent to the launcher is here. A process that the others have gone on without is killed, because it may still write
into their memory. The messages are in `launcher_channel`.
"""

import contextlib
import hmac
import os
import selectors
import signal
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from multiring._agreement.referee import Referee
from multiring._agreement.vote_messages import decode
from multiring._runtime.failures.launcher_channel import (
    ALIVE,
    BYE,
    ENDED,
    FAILED,
    GIVE_UP,
    HELLO,
    KEEP,
    LEFT,
    MOST_BYTES,
    REFEREE_SAYS,
    UNKNOWN,
    VOTE,
    WATCHED,
    LauncherMessage,
    MessageCutter,
    message_in,
    proof_of,
)
from multiring._settings import vote_address

_UCRED = struct.Struct("3i")
_MOST_PENDING = 64  # connections that have not said who they are
_NUMBERS = 1 << 16
_GRACE_S = 2.0  # a process that others have seen dying is dead by then


@dataclass(eq=False, slots=True)
class _Voter:
    """A connection, and the rank's process at its other end."""

    connection: socket.socket
    pid: int
    cutter: MessageCutter = field(default_factory=MessageCutter)
    rank: int | None = None
    process: int | None = None  # a file descriptor of the process, which is readable once it has ended
    is_watched: bool = False  # `process` is surely the sender's
    vote: bytes = b""  # the last one kept
    has_left: bool = False  # in order
    has_failed: bool = False  # it ends by an error, and has closed all connections already
    has_ended: bool = False
    is_unsure: bool = False  # a later vote may have been lost
    unsent: bytes = b""
    is_closed: bool = False

    @property
    def is_silent(self) -> bool:
        """Whether the process sends nothing more, and writes no other rank's memory."""
        return self.has_left or self.has_failed or self.has_ended


class VotePoint:
    """Where the ranks of one job meet their launcher for votes.

    Args:
        reports: the value of MULTIRING_REPORTS in the ranks.
        secret: the job's secret.
        job: the job's name.
        size: the number of ranks.
        say: shows a message.
    """

    def __init__(self, reports: str, secret: bytes, job: str, size: int, say: Callable[[str], None]) -> None:
        self._secret, self._job, self._size, self._say = secret, job, size, say
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._listener.bind(vote_address(reports))
        self._listener.listen(_NUMBERS)
        self._voters: list[_Voter] = []
        self._ranks: dict[int, _Voter] = {}
        self._referee = Referee()
        self._generation = 0
        self._members: tuple[int, ...] = tuple(range(size))
        self._doomed: dict[int, float] = {}  # ranks that are out -> when to kill their processes
        self._killed: set[int] = set()
        self.given_up = ""  # why a rank cannot go on; empty if all can

    @property
    def is_complete(self) -> bool:
        """Whether every rank has come, so that the others can go on without any."""
        return len(self._ranks) == self._size and all(each.is_watched for each in self._ranks.values())

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
        if voter is not None and voter.process is not None and not voter.has_ended:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(voter.process, signal.SIGKILL)

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
                    f"rank {rank} (pid {voter.pid}) has not answered the others, which went on without it: it is "
                    "killed, because it could still write into their memory"
                )
                self.kill(rank)

    def close(self) -> None:
        """Close all connections."""
        for voter in self._voters:
            self._drop(voter)
            if voter.process is not None:
                os.close(voter.process)
                voter.process = None
        self._listener.close()

    def watch(self, poll: selectors.BaseSelector) -> None:
        """Register all descriptors with `poll`, each with what to do as its data."""
        poll.register(self._listener, selectors.EVENT_READ, self._accept)
        for voter in self._voters:
            if not voter.is_closed:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if voter.unsent else 0)
                poll.register(voter.connection, events, lambda voter=voter: self._serve(voter))
            if voter.process is not None and not voter.has_ended:
                poll.register(voter.process, selectors.EVENT_READ, lambda voter=voter: self._note_end(voter))

    # ---- what comes ----

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
            pid, user, _ = _UCRED.unpack(found)
            pending = sum(each.rank is None and not each.is_closed for each in self._voters)
            if user != os.geteuid() or pending >= _MOST_PENDING:
                connection.close()
                return
            self._voters = [each for each in self._voters if each.rank is not None or not each.is_closed]
            self._voters.append(_Voter(connection, pid))

    def _serve(self, voter: _Voter) -> None:
        self._flush(voter)
        self._read(voter)

    def _read(self, voter: _Voter) -> None:
        """Take all that has come from a process."""
        while not voter.is_closed:
            try:
                data = voter.connection.recv(1 << 16)
                lines = voter.cutter.take(data)
                if not data:
                    self._drop(voter)
                for line in lines:
                    self._take(voter, message_in(line))
            except BlockingIOError:
                return
            except OSError:  # ECONNRESET: it died with lines unread. All that it has sent was read before.
                self._drop(voter)
            except ValueError:
                self._give_up(voter)

    def _take(self, voter: _Voter, line: LauncherMessage) -> None:
        if voter.rank is None:
            self._admit(voter, line)
        elif line.kind == ALIVE:
            self._catch_up(voter)
        elif line.kind == KEEP:
            self._keep(voter, line.rest)
        elif line.kind == VOTE:
            for to, data in self._referee.hear(voter.rank, line.rest).sends:
                if to in self._ranks:
                    self._send(self._ranks[to], f"{REFEREE_SAYS} ".encode() + data)
        elif line.kind == GIVE_UP:
            self.given_up = self.given_up or f"rank {voter.rank} gives up: {line.rest.decode(errors='replace')}"
        elif line.kind in (BYE, FAILED):
            voter.has_left, voter.has_failed = line.kind == BYE, line.kind == FAILED
            self._tell_all(voter)

    def _admit(self, voter: _Voter, line: LauncherMessage) -> None:
        wanted = proof_of(self._secret, self._job, line.rank)
        is_right = line.kind == HELLO and hmac.compare_digest(line.rest, wanted.encode())
        if not is_right or not 0 <= line.rank < self._size or line.rank in self._ranks:
            self._drop(voter)  # a number stands for one process for good
            return
        voter.process = os.pidfd_open(voter.pid)
        voter.rank = line.rank
        self._ranks[line.rank] = voter
        # Its answer comes after the line above, so the descriptor is not that of a later process with the same ID.
        self._send(voter, WATCHED.encode())

    def _catch_up(self, voter: _Voter) -> None:
        voter.is_watched = True
        for each in self._ranks.values():
            if each is not voter and each.is_silent:
                self._send(voter, _end_of(each))

    def _keep(self, voter: _Voter, kept: bytes) -> None:
        vote = decode(kept).vote
        voter.vote = kept
        if vote.generation <= self._generation:
            return
        self._members = vote.members
        self._generation = vote.generation  # it is decided: nobody votes in a generation that is not
        for rank, each in self._ranks.items():
            if rank not in vote.members and not each.is_silent:
                self._doomed.setdefault(rank, time.monotonic() + _GRACE_S)

    def _note_end(self, voter: _Voter) -> None:
        self._read(voter)  # a dead process sends nothing more, and this was all
        is_news = voter.is_watched and not voter.is_silent
        voter.has_ended = True
        self._drop(voter)
        if voter.process is not None:
            os.close(voter.process)
            voter.process = None
        if is_news:
            self._tell_all(voter)

    # ---- what goes ----

    def _tell_all(self, gone: _Voter) -> None:
        for each in self._ranks.values():
            if each is not gone and each.is_watched:
                self._send(each, _end_of(gone))

    def _send(self, voter: _Voter, line: bytes) -> None:
        if voter.is_closed:
            return
        voter.unsent += line + b"\n"
        self._flush(voter)
        if len(voter.unsent) > MOST_BYTES:  # a stopped process, which finds the channel closed when it goes on
            self._give_up(voter)

    def _flush(self, voter: _Voter) -> None:
        if not voter.unsent or voter.is_closed:
            return
        try:
            voter.unsent = voter.unsent[voter.connection.send(voter.unsent) :]
        except BlockingIOError:
            return
        except OSError:  # its end is seen by `process`; what it has sent is read then
            voter.unsent = b""

    def _give_up(self, voter: _Voter) -> None:
        voter.is_unsure = True
        self._drop(voter)

    def _drop(self, voter: _Voter) -> None:
        if not voter.is_closed:
            voter.is_closed = True
            voter.connection.close()


def _end_of(voter: _Voter) -> bytes:
    kind = LEFT if voter.has_left else ENDED
    return f"{kind} {voter.rank} ".encode() + (UNKNOWN if voter.is_unsure else voter.vote)
