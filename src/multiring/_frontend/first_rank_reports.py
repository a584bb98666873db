"""Reports of rank 0: other ranks learn what rank 0 has done, and rank 0 does not wait for them.

Some acts belong to rank 0 alone, such as writing a file, but every rank's program may ask for them. A program may also
ask for an act on rank 0 only. So rank 0 acts at once and keeps a report. Another rank that asks for the same act waits
until rank 0 has reported it, or until rank 0 can no longer do it:

- rank 0 has closed the phase in which the act belongs, or
- rank 0 waits in a collective that the asking rank has not called yet. Both ranks run the same program, so rank 0 has
  passed the place at which the other rank asks.

The messages are control messages. They travel along a binary tree, so no rank has more than three connections for them.
"""

import itertools
import json
import logging
import sys
import threading
import time
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

from multiring._frontend.errors import internal
from multiring._frontend.process_sets import world_now
from multiring._native import ControlMessage, ControlMessageKind
from multiring._runtime import Group
from multiring._runtime.group.handles import Key
from multiring._runtime.job.threads import thread_states
from multiring.errors import PeerLostError, StallError, StateError

_log = logging.getLogger("multiring")
_ASK, _ANSWER = 0, 1
_FIRST_AGAIN_S, _LAST_AGAIN_S = 0.02, 5.0  # questions are repeated, because rank 0 may be blocked later
_MOST_OPEN = 4096  # the maximum number of stored questions, and of phases

Phase = tuple[int, int]  # the number of a call, such as `fit`, and of a hook in it; the same on all ranks


class OutcomeKind(IntEnum):
    """What rank 0 says about an act."""

    DONE = 0
    FAILED = 1
    NEVER = 2  # rank 0 has closed the phase without this act
    BLOCKED = 3  # rank 0 waits in a collective


class ReportQuestion(NamedTuple):
    """A question of one rank about one act of rank 0."""

    asker: int  # a rank of the group
    serial: int  # the question's number on that rank
    phase: Phase
    act: str
    repetition: int  # how many acts of this name the phase must have, this one included


class ReportAnswer(NamedTuple):
    """The answer to a question."""

    asker: int
    serial: int
    kind: OutcomeKind
    text: str  # the error of a failed act
    keys: tuple[Key, ...]  # the operations in which rank 0 is blocked


@dataclass(slots=True)
class _PhaseReport:
    acts: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  # the error of each act; "" for none
    is_closed: bool = False


class FirstRankReports:
    """The reports of rank 0 of a group. Every rank of the group must create its own object.

    Args:
        group: the ranks.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._services = group.calls.services
        self._ranks = group.calls.ranks
        self._rank, self._size = group.rank, group.size
        self._changed = threading.Condition()
        self._serials = itertools.count()
        self._phases: dict[Phase, _PhaseReport] = {}
        # On rank 0: questions without an answer.
        self._open: OrderedDict[tuple[int, int], ReportQuestion] = OrderedDict()
        self._answers: dict[int, ReportAnswer] = {}
        self._asked: set[int] = set()
        self._lost = ""
        self._is_over = False
        self._thread: int | None = None  # the thread of rank 0 that opens phases
        self.last_call = 0  # the number of the latest call
        self._id = group.calls.purpose_id("reports of the first rank")
        self._control = self._services.control if group.size > 1 else None
        if self._control is not None:
            near = [each for each in (*self._children(), self._parent()) if each is not None]
            self._services.context.link_with([self._ranks[each] for each in near])
            self._control.add(self._id, self)

    # ---- on rank 0 ----

    def open(self, phase: Phase) -> None:
        """Start a phase. Other ranks call it without effect."""
        self._thread = threading.get_ident()
        if self._rank == 0:
            with self._changed:
                self._phases[phase] = _PhaseReport()
                while len(self._phases) > _MOST_OPEN:
                    self._phases.pop(next(iter(self._phases)))

    def report(self, phase: Phase, act: str, failed: str = "") -> None:
        """Report an act of rank 0, or its failure."""
        with self._changed:
            found = self._phases.get(phase)
            if found is not None:
                found.acts[act].append(failed)
                self._answer_open()

    def close(self, phase: Phase) -> None:
        """End a phase: rank 0 does nothing more in it."""
        with self._changed:
            found = self._phases.get(phase)
            if found is not None:
                found.is_closed = True
                self._answer_open()

    def forget(self, phase: Phase) -> None:
        """Drop the reports of a phase that all ranks have ended."""
        with self._changed:
            self._phases.pop(phase, None)

    # ---- on the other ranks ----

    def learn(self, phase: Phase, act: str, count: int) -> tuple[OutcomeKind, str]:
        """Wait until rank 0 has done an act, or will not do it in this phase.

        Args:
            phase: the phase that this rank is in.
            act: the act's name.
            count: how often this rank has asked for the act in this phase, this question included.

        Returns:
            DONE; FAILED and rank 0's error; or NEVER.

        Raises:
            CollectiveError: a rank is gone, or nothing came from rank 0 for MULTIRING_STALL_TIMEOUT_S.
        """
        question = ReportQuestion(self._rank, next(self._serials), phase, act, count)
        with self._changed:
            self._asked.add(question.serial)
        try:
            return self._learn(question)
        finally:
            with self._changed:
                self._asked.discard(question.serial)
                self._answers.pop(question.serial, None)

    def _learn(self, question: ReportQuestion) -> tuple[OutcomeKind, str]:
        started_s = time.monotonic()
        again_s, ask_at_s, warn_at_s = _FIRST_AGAIN_S, started_s, started_s + self._services.stall_warn_s
        while True:
            with self._changed:
                answer = self._answers.pop(question.serial, None)
                lost, is_over = self._lost, self._is_over
            if answer is not None and answer.kind is not OutcomeKind.BLOCKED:
                return answer.kind, answer.text
            if answer is not None and self._has_passed(answer):
                return OutcomeKind.NEVER, ""
            if lost:
                raise internal(PeerLostError(f"{question.act}: {lost}"), question.act)
            if is_over:
                raise internal(StateError(f"{question.act}: this rank has left the job"), question.act)
            now_s = time.monotonic()
            if now_s >= warn_at_s:
                warn_at_s = float("inf")
                _log.warning("%s", self._silent(question, now_s - started_s))
            if now_s - started_s >= self._services.stall_timeout_s:
                raise internal(StallError(self._silent(question, now_s - started_s)), question.act)
            if now_s >= ask_at_s:
                self._send(self._parent(), _ASK, question)
                ask_at_s, again_s = now_s + again_s, min(2 * again_s, _LAST_AGAIN_S)
            with self._changed:
                if question.serial not in self._answers and not self._lost and not self._is_over:
                    self._changed.wait(min(ask_at_s - now_s, _LAST_AGAIN_S))

    def _has_passed(self, answer: ReportAnswer) -> bool:
        """Return whether rank 0 waits in a collective that this rank has not called yet."""
        return any(self._services.rank_status.has_started(key) is False for key in answer.keys)

    def _silent(self, question: ReportQuestion, quiet_s: float) -> str:
        where = self._services.rank_status.look([self._ranks[0]])
        return (
            f"{question.act}: rank 0 has not done this for {quiet_s:.0f} s, and has not ended its callbacks{where}; "
            "want the same callbacks on all ranks, or the call on rank 0 only"
        )

    # ---- for the control thread ----

    def hear(self, notice: ControlMessage) -> None:
        """Answer a question or store an answer; pass both on if they are for another rank."""
        if notice.kind is not ControlMessageKind.MESSAGE:
            return
        content = json.loads(notice.payload)
        if notice.tag == _ASK and self._rank != 0:
            self._send(self._parent(), _ASK, content)
        elif notice.tag == _ASK:
            asker, serial, phase, act, repetition = content
            self._hear_question(ReportQuestion(asker, serial, tuple(phase), act, repetition))
        elif content[0] != self._rank:
            self._send(self._towards(content[0]), _ANSWER, content)
        else:
            asker, serial, kind, text, keys = content
            with self._changed:
                if serial in self._asked:
                    self._answers[serial] = ReportAnswer(
                        asker, serial, OutcomeKind(kind), text, tuple(map(tuple, keys))
                    )
                    self._changed.notify_all()

    def _hear_question(self, question: ReportQuestion) -> None:
        with self._changed:
            answer = self._answer_to(question)
            if answer is None:
                self._open[question[:2]] = question
                if len(self._open) > _MOST_OPEN:
                    self._open.popitem(last=False)
        if answer is None:
            keys = self._blocked_in()
            answer = ReportAnswer(*question[:2], OutcomeKind.BLOCKED, "", keys) if keys else None
        if answer is not None:
            self._send(self._towards(question.asker), _ANSWER, answer)

    def has_come(self, name: str) -> bool:  # noqa: ARG002 -- part of the interface
        """Return False: this listener has no operations."""
        return False

    def lose(self, rank: int, *, died: bool, why: str) -> None:
        """End the waits of this rank, because the job has lost a rank."""
        if rank in self._ranks:
            with self._changed:
                self._lost = f"rank {self._ranks.index(rank)} {'died' if died else 'left'}, {why}"
                self._changed.notify_all()

    def end(self) -> None:
        """End the waits of this rank, because it leaves the job."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _answer_to(self, question: ReportQuestion) -> ReportAnswer | None:
        found = self._phases.get(question.phase)
        if found is None:
            return None
        errors = found.acts.get(question.act, [])
        if len(errors) >= question.repetition:
            text = errors[question.repetition - 1]
            return ReportAnswer(*question[:2], OutcomeKind.FAILED if text else OutcomeKind.DONE, text, ())
        return ReportAnswer(*question[:2], OutcomeKind.NEVER, "", ()) if found.is_closed else None

    def _answer_open(self) -> None:
        for mark, question in list(self._open.items()):
            answer = self._answer_to(question)
            if answer is not None:
                del self._open[mark]
                self._send(self._towards(question.asker), _ANSWER, answer)

    def _blocked_in(self) -> tuple[Key, ...]:
        """Return the operations for which rank 0's thread of callbacks waits."""
        blocked = thread_states().blocked
        frame = sys._current_frames().get(self._thread or 0)  # noqa: SLF001 -- there is no public function
        return tuple(each.waiter.key for each in blocked if each.frame is frame and each.waiter.key is not None)

    # ---- the tree ----

    def _parent(self) -> int | None:
        return (self._rank - 1) // 2 if self._rank else None

    def _children(self) -> list[int]:
        return [each for each in (2 * self._rank + 1, 2 * self._rank + 2) if each < self._size]

    def _towards(self, rank: int) -> int:
        """Return the child of this rank through which messages to `rank` travel."""
        while (above := (rank - 1) // 2) != self._rank:
            rank = above
        return rank

    def _send(self, rank: int | None, tag: int, content: Any) -> None:
        if self._control is None or rank is None:
            return
        try:
            self._control.send(self._ranks[rank], self._id, tag, json.dumps(content).encode())
        except StateError:  # the rank accepts no control messages at the moment; the asker repeats its question
            return


def first_rank_reports() -> FirstRankReports:
    """Return the reports of the current job. Every rank must call it before a rank asks."""
    world = world_now()
    return world.job_objects.made(FirstRankReports, lambda: FirstRankReports(world.group))
