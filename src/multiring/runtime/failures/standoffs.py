"""Standoffs: ranks that wait for each other, each in a call that another one has not come to.

    if rank == 0:
        mt.allreduce(loss)  # rank 0 waits here for the others,
    ...                     # which wait in the next bucket of gradients for rank 0

Operations of one group that differ are told from each other when they meet; these are of different groups, and never
meet. So a rank that has waited for a while sends a question after those it waits for. Who has not come to what the
question is about, and waits itself, passes it on to those that it waits for, with a line on where it is. A
question that comes back to who sent it has gone round a circle of ranks of which none can go on: unless one has
another thread, which might make the call. A rank that computes waits for nobody, and no circle goes through it.

Source: Chandy, Misra & Haas, "Distributed deadlock detection", ACM Transactions on Computer Systems 1(2), 1983,
section 3 (the AND model).
"""

import itertools
import json
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from multiring._native import ControlMessage, ControlMessageKind
from multiring.errors import StateError
from multiring.runtime.failures.control_thread import Control
from multiring.runtime.group.handles import Key, Waiter
from multiring.runtime.job.threads import Blocked, thread_states

_log = logging.getLogger("multiring")
_ADDRESS = 1  # of these notices; groups have random ones
_ASK, _CIRCLE, _TELL = 0, 1, 2
_MOST_HOPS = 32
_MOST_SEEN = 4096  # questions


class Counted(Protocol):
    """The operations of a group."""

    id: int  # the same on all ranks

    @property
    def last(self) -> int:
        """The number of the operation that came last."""


class Hop(NamedTuple):
    """A rank that waits."""

    rank: int
    where: str  # it is, and what it waits for, in words
    key: Key


@dataclass(frozen=True, slots=True)
class Question:
    """Whom does `path`'s first rank wait for?"""

    serial: int  # of the first rank's questions
    path: tuple[Hop, ...]  # each waits for the next, which has not come to it; the last one for whoever is asked
    is_certain: bool  # none of them could do anything else

    @property
    def origin(self) -> int:
        """Who asks."""
        return self.path[0].rank

    def packed(self) -> bytes:
        """Return what `read` reads."""
        return json.dumps([self.serial, self.path, self.is_certain]).encode()

    @classmethod
    def read(cls, payload: bytes) -> "Question":
        """Return a question of another rank."""
        serial, path, is_certain = json.loads(payload)
        return cls(serial, tuple(Hop(rank, where, tuple(key)) for rank, where, key in path), is_certain)


class Standoffs:
    """One rank's part in finding them. Other threads than the control thread only `seek` and `know`.

    Args:
        control: what carries the questions.
        rank: this one, of the world.
        sure_s: after so many seconds a standoff that nobody can end is an error.
    """

    def __init__(self, control: Control, rank: int, sure_s: float) -> None:
        self._control = control
        self._rank = rank
        self._sure_s = sure_s
        self._serials = itertools.count()
        self._groups: weakref.WeakValueDictionary[int, Counted] = weakref.WeakValueDictionary()
        self._seen: OrderedDict[tuple[int, int, Key], None] = OrderedDict()
        self._told: weakref.WeakSet[Waiter] = weakref.WeakSet()
        self._is_leaving = False
        self._is_missed = threading.Event()  # by another rank, while this one leaves
        control.add(_ADDRESS, self)

    def know(self, group: Counted) -> None:
        """Take note of a group of this process."""
        self._groups[group.id] = group

    def seek(self, waiter: Waiter) -> None:
        """Have it found out whether whom this thread waits for in `waiter` waits for this rank."""
        here = next((each for each in thread_states().blocked if each.waiter is waiter), None)
        if not self._is_leaving and here is not None and waiter.key is not None:
            question = Question(next(self._serials), (self._hop(here, waiter.key),), is_certain=True)
            for rank in waiter.stalled_on()[0]:
                if rank != self._rank:  # as it is where the others have given up on this one
                    self._send(rank, _ASK, question)

    def leave(self) -> Callable[[], bool]:
        """Seek nothing any more. Return what tells whether another rank waits for what this one will not come to."""
        self._is_leaving = True
        return self._is_missed.is_set

    # ---- for the control thread ----

    def hear(self, notice: ControlMessage) -> None:
        """Pass a question on, or act on a circle."""
        if notice.kind is not ControlMessageKind.MESSAGE:
            return
        question = Question.read(notice.payload)
        if notice.tag == _ASK:
            self._pass_on(question)
        elif notice.tag == _CIRCLE:
            self._judge(question)
        elif notice.tag == _TELL:
            self._tell(question)

    def has_come(self, name: str) -> bool:  # noqa: ARG002 -- there are none
        """Return False: there are no operations here."""
        return False

    def lose(self, rank: int, *, died: bool, why: str) -> None:
        """Leave a loss to those that wait for the rank."""

    def end(self) -> None:
        """Leave whoever asks to their patience."""

    def _pass_on(self, question: Question) -> None:
        key = question.path[-1].key
        mark = (question.origin, question.serial, key)
        if mark in self._seen or len(question.path) > _MOST_HOPS:
            return
        self._seen[mark] = None
        if len(self._seen) > _MOST_SEEN:
            self._seen.popitem(last=False)
        has_come = self._has_come(key)
        if self._is_leaving and not has_come:
            self._is_missed.set()
            return
        here = thread_states()
        if not here.is_main_at_rest:
            return
        # Who has come to it may wait in it for others yet; its threads do not matter then.
        asked = {each.rank for each in question.path}
        for each in here.blocked:
            own = each.waiter.key
            if own is None or (has_come and own != key):
                continue
            is_certain = question.is_certain and each.is_lasting and (has_come or here.is_single)
            ours = Question(question.serial, (*question.path, self._hop(each, own)), is_certain)
            ranks = each.waiter.stalled_on()[0]
            if question.origin in ranks:
                self._send(question.origin, _CIRCLE, ours)
                return
            for rank in ranks:
                if rank not in asked:
                    self._send(rank, _ASK, ours)

    def _judge(self, circle: Question) -> None:
        """Act on a question of this rank's that has come back; the path's last rank waits for this one."""
        if self._has_come(circle.path[-1].key):
            return
        here = thread_states()
        own = _blocked_on(here.blocked, circle.path[0].key)
        if own is None:
            return
        ranks, quiet_s = own.waiter.stalled_on()
        if circle.path[1].rank not in ranks:
            return
        is_certain = circle.is_certain and own.is_lasting and here.is_single and quiet_s >= self._sure_s
        # Of the named operations of one set the agreement tells all ranks the same.
        is_agreed_on = len({each.key[:2] for each in circle.path}) == 1 and circle.path[0].key[0] == "name"
        self._tell(Question(circle.serial, circle.path, is_certain and not is_agreed_on))

    def _tell(self, circle: Question) -> None:
        """Warn whoever waits here, or have it give up; and tell the next rank of the circle, unless it has been."""
        place = next((index for index, each in enumerate(circle.path) if each.rank == self._rank), None)
        if place is None:
            return
        following = circle.path[(place + 1) % len(circle.path)]
        if place + 1 < len(circle.path):
            self._send(following.rank, _TELL, circle)
        own = _blocked_on(thread_states().blocked, circle.path[place].key)
        if own is None:
            return
        told = "; ".join(f"rank {each.rank} is {each.where}" for each in circle.path)
        text = f"{told}: a circle, in which each waits in a call that the next has not come to"
        if own.waiter not in self._told:
            self._told.add(own.waiter)
            quiet_s = own.waiter.stalled_on()[1]
            _log.warning(
                "%s: nothing has come from rank %d for %.1f s; %s. It is an error after %.0f s where no other thread "
                "could make one of these calls",
                own.waiter.title,
                following.rank,
                quiet_s,
                text,
                self._sure_s,
            )
        if circle.is_certain:
            own.waiter.verdict = f"; {text}"
            own.waiter.give_up(following.rank)

    def _hop(self, blocked: Blocked, key: Key) -> Hop:
        return Hop(self._rank, blocked.where, key)

    def _has_come(self, key: Key) -> bool:
        kind, group, which = key
        if kind == "name":
            return self._control.has_come(group, str(which))
        known = self._groups.get(group)
        if known is not None:
            return known.last >= int(which)
        # A message: whoever sends or receives it waits for the other rank alone.
        return _blocked_on(thread_states().blocked, key) is not None

    def _send(self, rank: int, tag: int, question: Question) -> None:
        try:
            self._control.send(rank, _ADDRESS, tag, question.packed())
        except StateError:  # it takes nothing; or this rank is leaving
            return


def _blocked_on(blocked: list[Blocked], key: Key) -> Blocked | None:
    return next((each for each in blocked if each.waiter.key == key), None)
