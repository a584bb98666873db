"""The launcher's part in letting newcomers in: it gives the processes places in the job's next formation.

A formation begins when every rank that is left stands at the same commit, and has said so. It is open once all who are
admitted have met. If one ends before, the others get new places. The messages are in `intake_channel`.
"""

import hmac
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from multiring._launch.local_point import LocalClient, LocalPoint
from multiring._launch.vote_point import VotePoint
from multiring._runtime.failures.computing_processes import ComputingProcesses
from multiring._runtime.failures.formation_place import FormationPlace, intake_proof
from multiring._runtime.failures.intake_channel import (
    ADMITTED,
    COMMITTED,
    JOINED,
    NOT_JOINED,
    NOT_NOW,
    OPENED,
    PING,
    READY,
    WAITING,
)
from multiring._runtime.failures.launcher_channel import ALIVE, HELLO, WATCHED, LauncherMessage

_COME_S = 20.0  # how long the first rank that is ready waits for the last one, before the ranks vote
_MEET_S = 20.0  # how long a formation may take until the launcher asks who still lives
_ANSWER_S = 20.0  # how long a process that does not compute may take to answer
_AGAIN_S = 1.0  # between two attempts to meet
_MOST_ATTEMPTS = 10  # in a row, while no process was lost


@dataclass(frozen=True, slots=True)
class FormationAddresses:
    """Where the processes of a formation meet, and with which secret.

    - rendezvous, secret: as in an Identity.
    - votes: by rank, the address at which the process takes part in votes.
    """

    rendezvous: str
    secret: str = field(repr=False)
    votes: tuple[str, ...]


def addresses_here(_job: str, numbers: Sequence[int]) -> FormationAddresses:
    """Return where processes of this host meet."""
    token = secrets.token_hex(8)
    return FormationAddresses(
        f"@multiring-{token}", secrets.token_hex(32), (f"\0multiring-{token}-vote",) * len(numbers)
    )


@dataclass(frozen=True, slots=True)
class FormationOpening:
    """How a formation is opened.

    - open_votes: takes the place of rank 0 and the numbers of the processes; opens the formation's point for votes.
    - addresses_of: takes the job's name in a formation and the numbers of its processes; returns where they meet.
    """

    open_votes: Callable[[FormationPlace, Sequence[int]], None]
    addresses_of: Callable[[str, Sequence[int]], FormationAddresses] = addresses_here


@dataclass(eq=False, slots=True)
class _Comer(LocalClient):
    """A process of the job, by its number."""

    generation: int | None = None  # set while it is a rank that is ready to form anew
    has_joined: bool = False
    has_committed: bool = False  # at least once
    asked_s: float | None = None  # when it was asked whether it lives, and has not answered
    used: int | None = None  # `told_used` at the last call of `computes`
    computing: ComputingProcesses = field(init=False)

    def __post_init__(self) -> None:
        self.computing = ComputingProcesses({} if self.relay is not None else {self.pid: self.pid})

    def computes(self) -> bool:
        """Return whether the process has used CPU time since the last call."""
        if self.relay is None:
            return self.computing.any_of([self.pid])
        before, self.used = self.used, self.told_used
        return before is not None and self.used is not None and self.used > before


class IntakePoint(LocalPoint[_Comer]):
    """Where the processes of one job meet their launcher to form anew.

    Args:
        address: the address of an abstract socket; None if all processes come by the agents of their hosts.
        job: the job's name.
        credentials: by number, the secret and the job's name that each process was given.
        most: the largest number of ranks.
        opening: how a formation is opened.
        say: shows a message.
    """

    def __init__(
        self,
        address: str | None,
        job: str,
        credentials: Sequence[tuple[str, str]],
        most: int,
        opening: FormationOpening,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(address, _Comer)
        self._job, self._most, self._opening, self._say = job, most, opening, say
        self._credentials = dict(enumerate(credentials))
        self._comers: dict[int, _Comer] = {}
        self._size = len(credentials)
        self.members: tuple[int, ...] = tuple(range(len(credentials)))  # of the last open formation, by rank
        self.admitted: tuple[int, ...] = self.members  # of the present one
        self.formation = 0
        self.is_open = True
        self.has_committed = False  # a rank has, since this was last set to False
        self.was_committed = False  # a rank has committed, so the program can let newcomers in
        self.is_settled = False  # a newcomer has for the first time, since this was last set to False
        self.given_up = ""  # why the ranks cannot form
        self._waiting: list[int] = []
        self._come_by: float | None = None  # when the last rank must be ready
        self._meet_by: float | None = None  # when all must have met
        self._again_at: float | None = None  # when to try once more
        self._attempts = 0
        self._told = ""

    def expect(self, number: int, secret: str, job: str) -> None:
        """Know a newcomer that is started."""
        self._credentials[number] = secret, job

    @property
    def is_complete(self) -> bool:
        """Whether every rank of the start has come."""
        return all(number in self._comers for number in range(self._size))

    @property
    def acts_at(self) -> float | None:
        """The monotonic time at which `act` must be called; None if nothing is to be done."""
        return min((at for at in (self._come_by, self._meet_by, self._again_at) if at is not None), default=None)

    def is_settled_in(self, number: int) -> bool:
        """Return whether a process has committed."""
        return number in self._comers and self._comers[number].has_committed

    def act(self, votes: VotePoint) -> None:
        """Let newcomers in if all ranks are at the intake, and do what time asks for.

        Args:
            votes: the present formation's point for votes.
        """
        now = time.monotonic()
        if self._again_at is not None and now >= self._again_at:
            self._form()
        if self._meet_by is not None and now >= self._meet_by:
            self._ask_who_lives(now)
        ready = [each for each in self._comers.values() if each.generation is not None]
        if not ready or not self.is_open:
            return
        ranks = {number: rank for rank, number in enumerate(self.members)}
        left = [each for each in self.members if not self._has_ended(each) and not votes.is_out(ranks[each])]
        is_late = self._come_by is not None and now >= self._come_by
        is_over = any(votes.has_left(rank) for rank in ranks.values())
        if is_late or is_over or any(each.generation != votes.generation for each in ready):
            self._send_away(ready)
        # A formation closes the point for votes, which still has to kill those that are out and do not end.
        elif votes.acts_at is None and all(self._comers[each].generation is not None for each in left):
            self._admit_all(left)

    def kill(self, number: int) -> None:
        """Kill what may be left of a process."""
        if number in self._comers:
            self._kill(self._comers[number])

    # ---- what comes ----

    def _take(self, comer: _Comer, line: LauncherMessage) -> None:
        if comer.number is None:
            self._greet(comer, line)
        elif line.kind == ALIVE:
            comer.is_watched = True
            self._tell_waiting()
        elif line.kind == COMMITTED:
            self.is_settled |= comer.number >= self._size and not comer.has_committed
            self.has_committed = self.was_committed = comer.has_committed = True
        elif line.kind == PING:
            comer.asked_s = None
        elif line.kind == READY and comer.number >= self._size and comer.number not in self.admitted:
            self._waiting.append(comer.number)
            self._tell_waiting()
        else:
            self._take_of_formation(comer, line)

    def _take_of_formation(self, comer: _Comer, line: LauncherMessage) -> None:
        formation, _, rest = line.rest.partition(b" ")
        if int(formation) != self.formation:
            return  # it has not heard yet of a later one
        if line.kind == READY and self.is_open:
            generation, _, told = rest.partition(b" ")
            comer.generation, self._told = int(generation), told.decode()
            self._come_by = self._come_by or time.monotonic() + _COME_S
        elif line.kind == JOINED:
            comer.has_joined = True
            self._open_if_all_have_met()
        elif line.kind == NOT_JOINED and not self.is_open and self._again_at is None:
            self._attempts += 1
            self._again_at = time.monotonic() + _AGAIN_S
            if self._attempts > _MOST_ATTEMPTS:
                self.given_up = f"the ranks cannot form with newcomers: {rest.decode(errors='replace')}"

    def _greet(self, comer: _Comer, line: LauncherMessage) -> None:
        secret, job = self._credentials.get(line.rank, ("", ""))
        is_right = line.kind == HELLO and hmac.compare_digest(
            line.rest, intake_proof(secret.encode(), job, line.rank).encode()
        )
        if not is_right or not secret or line.rank in self._comers:
            self._drop(comer)  # a number stands for one process for good
            return
        self._know(comer, line.rank)
        self._comers[line.rank] = comer
        self._send(comer, WATCHED.encode())

    def _see_end(self, comer: _Comer) -> None:
        number = comer.number
        if number in self._waiting:
            self._waiting.remove(number)
            self._tell_waiting()
        if not self.is_open and number in self.admitted:
            self._attempts = 0
            self._form()

    # ---- formations ----

    def _admit_all(self, left: Sequence[int]) -> None:
        newcomers = self._waiting[: max(0, self._most - len(left))]
        self._waiting = self._waiting[len(newcomers) :]
        self._come_by = None
        self.is_open, self._attempts = False, 0
        self.admitted = (*left, *newcomers)
        for each in self._comers.values():
            each.generation = None
        self._form()

    def _form(self) -> None:
        """Give all who are admitted and live a place in a new formation."""
        self._again_at = None
        self.admitted = tuple(each for each in self.admitted if not self._has_ended(each))
        if not set(self.admitted) & set(self.members):
            return  # nobody has the job's state
        self.formation += 1
        self._meet_by = time.monotonic() + _MEET_S
        known = {number: former for former, number in enumerate(self.members)}
        job = f"{self._job}|formation {self.formation}"
        addresses = self._opening.addresses_of(job, self.admitted)
        places = [
            FormationPlace(
                formation=self.formation,
                rank=rank,
                former=tuple(known.get(each) for each in self.admitted),
                job=job,
                secret=addresses.secret,
                rendezvous=addresses.rendezvous,
                votes=addresses.votes[rank],
                told=self._told,
            )
            for rank in range(len(self.admitted))
        ]
        self._opening.open_votes(places[0], self.admitted)
        for number, place in zip(self.admitted, places, strict=True):
            comer = self._comers[number]
            comer.has_joined, comer.asked_s = False, None
            self._send(comer, f"{ADMITTED} ".encode() + place.encode())

    def _open_if_all_have_met(self) -> None:
        if self.is_open or not all(self._comers[each].has_joined for each in self.admitted):
            return
        self.is_open, self._meet_by, self._again_at, self._attempts = True, None, None, 0
        self.members = self.admitted
        for number in self.members:
            self._send(self._comers[number], f"{OPENED} {self.formation}".encode())
        self._tell_waiting()

    def _send_away(self, ready: Sequence[_Comer]) -> None:
        self._come_by = None
        for each in ready:
            each.generation = None
            self._send(each, NOT_NOW.encode())

    def _ask_who_lives(self, now: float) -> None:
        """Kill who neither answers nor computes, so that the others need not wait for it."""
        missing = [self._comers[each] for each in self.admitted if not self._comers[each].has_joined]
        for each in missing:
            computes = each.computes()
            if each.asked_s is None or computes:
                each.asked_s = now
                self._send(each, PING.encode())
            elif now - each.asked_s >= _ANSWER_S:
                self._say(f"process {each.pid} does not answer while the ranks meet newcomers: it is killed")
                self._kill(each)
        self._meet_by = now + _ANSWER_S / 2

    def _tell_waiting(self) -> None:
        for number in self.members:
            if number in self._comers and self._comers[number].is_watched:
                self._send(self._comers[number], f"{WAITING} {self._room()}".encode())

    def _room(self) -> int:
        """Return how many newcomers that wait can be let in."""
        left = sum(not self._has_ended(each) for each in self.members)
        return min(len(self._waiting), max(0, self._most - left))

    def _has_ended(self, number: int) -> bool:
        return number in self._comers and self._comers[number].has_ended
