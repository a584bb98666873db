"""Standoffs: ranks that wait for each other in calls that the others do not make.

    if rank == 0:
        mt.allreduce(loss)  # rank 0 waits here for the other ranks,
    ...                     # which wait for rank 0 in the next bucket of gradients

If two operations of the same group differ, the ranks detect the mismatch when they compare them. The operations of a
standoff belong to different groups, so they are never compared. Therefore a rank that has waited for a while sends a
question to the ranks that it waits for. Suppose that a rank receives a question, has not made the call, and waits
itself. Then it passes the question on to the ranks that it waits for, and adds a line about where it waits. If a
question returns to its sender, it has gone around a circle of waiting ranks. None of them can continue, unless one has
another thread that might make the call. A rank that computes waits for no rank, so no circle contains it.

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
from multiring._runtime.failures.control_thread import Control
from multiring._runtime.group.handles import Key, Waiter
from multiring._runtime.job.threads import Blocked, thread_states
from multiring.errors import StateError

_log = logging.getLogger("multiring")
_ADDRESS = 1  # the id of these control messages; groups have random ids
_ASK, _CIRCLE, _TELL = 0, 1, 2
_MOST_HOPS = 32
_MOST_SEEN = 4096  # the maximum number of stored questions


class NumberedGroup(Protocol):
    """A group whose operations are numbered."""

    id: int  # the same on all ranks

    @property
    def last(self) -> int:
        """The number of the latest operation."""


class Hop(NamedTuple):
    """A waiting rank on the path of a question."""

    rank: int
    where: str  # a description of where the rank's program waits, and for which operation
    key: Key  # the key of the operation
    among: str  # the ranks that take part in the operation; "" for a message between two


@dataclass(frozen=True, slots=True)
class StandoffQuestion:
    """A question that travels along a path of waiting ranks."""

    serial: int  # the question's number on the first rank
    path: tuple[Hop, ...]  # each rank waits for the next rank in the list; the last one waits for the asked rank
    is_certain: bool  # whether none of these ranks has another thread that could make the missing call

    @property
    def origin(self) -> int:
        """The rank that started the question."""
        return self.path[0].rank

    def packed(self) -> bytes:
        """Return the question as bytes, which `read` decodes."""
        return json.dumps([self.serial, self.path, self.is_certain]).encode()

    @classmethod
    def read(cls, payload: bytes) -> "StandoffQuestion":
        """Decode a question of another rank."""
        serial, path, is_certain = json.loads(payload)
        return cls(serial, tuple(Hop(rank, where, tuple(key), among) for rank, where, key, among in path), is_certain)


class Standoffs:
    """One rank's part in the detection of standoffs.

    Threads other than the control thread may call only `seek`, `know`, `has_started` and `leave`.

    Args:
        control: sends the questions.
        rank: this rank in the world.
        sure_s: the seconds after which a standoff that no thread can end becomes an error.
    """

    def __init__(self, control: Control, rank: int, sure_s: float) -> None:
        self._control = control
        self._rank = rank
        self._sure_s = sure_s
        self._serials = itertools.count()
        self._groups: weakref.WeakValueDictionary[int, NumberedGroup] = weakref.WeakValueDictionary()
        self._seen: OrderedDict[tuple[int, int, Key], None] = OrderedDict()
        self._told: weakref.WeakSet[Waiter] = weakref.WeakSet()
        self._is_leaving = False
        self._is_missed = threading.Event()  # set if another rank waits for this rank while it leaves
        control.add(_ADDRESS, self)

    def know(self, group: NumberedGroup) -> None:
        """Register a group of this process."""
        self._groups[group.id] = group

    def seek(self, waiter: Waiter) -> None:
        """Find out whether the ranks that `waiter` waits for also wait for this rank."""
        # The program may wait for the same operation by another handle, as on an engine.
        here = None if waiter.key is None else _blocked_on(thread_states().blocked, waiter.key)
        if not self._is_leaving and here is not None and waiter.key is not None:
            question = StandoffQuestion(next(self._serials), (self._hop(here, waiter.key),), is_certain=True)
            for rank in waiter.stalled_on()[0]:
                if rank != self._rank:  # a handle waits for this rank itself after the others have given up
                    self._send(rank, _ASK, question)

    def has_started(self, key: Key) -> bool | None:
        """Return whether this rank has started the operation; None if it does not take part in it."""
        kind, group, which = key
        if kind == "name":
            return self._control.has_come(group, str(which)) if self._control.knows(group) else None
        known = self._groups.get(group)
        return None if known is None else known.last >= int(which)

    def leave(self) -> Callable[[], bool]:
        """Stop asking, because this rank leaves.

        Returns:
            A function that returns whether another rank waits for an operation that this rank will never start.
        """
        self._is_leaving = True
        return self._is_missed.is_set

    # ---- for the control thread ----

    def hear(self, notice: ControlMessage) -> None:
        """Handle a control message: pass a question on, or act on a detected circle."""
        if notice.kind is not ControlMessageKind.MESSAGE:
            return
        question = StandoffQuestion.read(notice.payload)
        if notice.tag == _ASK:
            self._pass_on(question)
        elif notice.tag == _CIRCLE:
            self._judge(question)
        elif notice.tag == _TELL:
            self._tell(question)

    def has_come(self, name: str) -> bool:  # noqa: ARG002 -- part of the interface
        """Return False: this listener has no operations."""
        return False

    def lose(self, rank: int, *, died: bool, why: str) -> None:
        """Do nothing: the handles that wait for the rank act on the loss."""

    def end(self) -> None:
        """Do nothing: questions of this rank end with their time-outs."""

    def _pass_on(self, question: StandoffQuestion) -> None:
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
        # If this rank has made the call in question, it may still wait in this call. Then its other threads do not
        # matter.
        asked = {each.rank for each in question.path}
        for each in here.blocked:
            own = each.waiter.key
            if own is None or (has_come and own != key):
                continue
            is_certain = question.is_certain and each.is_lasting and (has_come or here.is_single)
            ours = StandoffQuestion(question.serial, (*question.path, self._hop(each, own)), is_certain)
            ranks = each.waiter.stalled_on()[0]
            if question.origin in ranks:
                self._send(question.origin, _CIRCLE, ours)
                return
            for rank in ranks:
                if rank not in asked:
                    self._send(rank, _ASK, ours)

    def _judge(self, circle: StandoffQuestion) -> None:
        """Act on a question of this rank that has returned.

        The last rank on its path waits for this rank.
        """
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
        # For named operations of one set, the agreement reports the deadlock to all ranks itself.
        is_agreed_on = len({each.key[:2] for each in circle.path}) == 1 and circle.path[0].key[0] == "name"
        self._tell(StandoffQuestion(circle.serial, circle.path, is_certain and not is_agreed_on))

    def _tell(self, circle: StandoffQuestion) -> None:
        """Warn or fail this rank's waiting operation, and pass the circle on.

        The circle is passed to its next rank.
        """
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
        text = f"{told}: a circle, in which each rank waits in a call that the next rank has not made{_sets_of(circle)}"
        if own.waiter not in self._told:
            self._told.add(own.waiter)
            quiet_s = own.waiter.stalled_on()[1]
            _log.warning(
                "%s: nothing has come from rank %d for %.1f s; %s. It becomes an error after %.0f s if no other thread "
                "can make one of these calls",
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
        return Hop(self._rank, blocked.where, key, blocked.among)

    def _has_come(self, key: Key) -> bool:
        kind, group, which = key
        if kind == "name":
            return self._control.has_come(group, str(which))
        known = self._groups.get(group)
        if known is not None:
            return known.last >= int(which)
        # The key belongs to a message: only its sender and its receiver wait for each other.
        return _blocked_on(thread_states().blocked, key) is not None

    def _send(self, rank: int, tag: int, question: StandoffQuestion) -> None:
        try:
            self._control.send(rank, _ADDRESS, tag, question.packed())
        except StateError:  # the rank accepts no control messages at the moment, or this rank is leaving
            return


def _sets_of(circle: StandoffQuestion) -> str:
    """Return a remark on the sets of ranks of the calls, if these differ.

    The ranks of different sets do not compare their calls, so a process set that was mistaken shows here first.
    """
    by_set: dict[str, list[int]] = {}
    for each in circle.path:
        by_set.setdefault(each.among, []).append(each.rank)
    if len(by_set) < 2 or "" in by_set:
        return ""
    told = "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}: the set of {among}"
        for among, ranks in sorted(by_set.items(), key=lambda item: item[1])
    )
    return (
        f". The calls are of different process sets or groups ({told}): if they are one call, pass the same set on "
        "every rank; if not, make them in the same order on every rank"
    )


def _blocked_on(blocked: list[Blocked], key: Key) -> Blocked | None:
    return next((each for each in blocked if each.waiter.key == key), None)
