"""Rank status: ask other ranks by control messages what they are doing.

The control thread answers, so a rank in an endless loop answers as well as a waiting rank. A rank does not answer if
its process is stopped, or if it runs code that does not release Python's global lock.
"""

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from multiring._native import ControlMessage
from multiring._runtime.bootstrap.rank_process import lives
from multiring._runtime.failures.control_thread import Control
from multiring._runtime.failures.standoffs import NumberedGroup, Standoffs
from multiring._runtime.group.handles import Key, Patience, StatusSource, Waiter
from multiring._runtime.job.threads import main_place, thread_states
from multiring.errors import StateError

_PATIENCE_S = 0.5  # an answer takes a millisecond; a missing answer must not delay an error for much longer
_ADDRESS = 0  # the id of these control messages; groups have random ids
_ASK, _ANSWER = 0, 1
_SIBLING_S, _SIBLING_PAUSE_S = 1.5, 0.01
_FRESH_S = 60.0  # an older answer is outdated
_NO_ANSWER = "does not answer: it is stopped, or held up outside Python"


class RankStatus(StatusSource):
    """Asks other ranks for their status, and answers their questions.

    Any thread may ask.

    Args:
        control: sends the questions.
        rank: this rank in the world.
        stall_warn_s: the seconds after which a warning about a silent rank is logged.
        siblings: the process ids, by rank, of ranks that the same process started by multiprocessing as this rank.
    """

    def __init__(self, control: Control, rank: int, stall_warn_s: float, siblings: Mapping[int, int]) -> None:
        self._siblings = siblings
        self._control = control
        self._rank = rank
        self.patience = Patience.of(stall_warn_s)
        self._standoffs = Standoffs(control, rank, self.patience.sure_s)
        self._heard = threading.Condition()
        self._questions: dict[int, dict[int, str]] = {}  # for each question, the answers by rank
        self._numbers = itertools.count(1)
        self._mute: dict[int, float] = {}  # the ranks that did not answer the last question, and its time
        self._latest: dict[int, tuple[float, str]] = {}  # for each rank, the time and text of its latest answer
        control.add(_ADDRESS, self)

    def look(self, ranks: Sequence[int]) -> str:
        """Return a text that says where these world ranks are.

        The text also names the ranks that do not answer within a moment.
        """
        return "".join(f"; rank {rank} {self._told(rank, each)}" for rank, each in self._ask(ranks).items())

    def know(self, group: NumberedGroup) -> None:
        """Register a group of this process.

        Its `id` and the number of its `last` operation are read later.
        """
        self._standoffs.know(group)

    def seek(self, waiter: Waiter) -> None:
        """Find out whether the ranks that `waiter` waits for also wait for this rank.

        See standoffs.py.
        """
        self._standoffs.seek(waiter)

    def has_started(self, key: Key) -> bool | None:
        """Return whether this rank has started the operation; None if it does not take part in it."""
        return self._standoffs.has_started(key)

    def leave(self) -> Callable[[], bool]:
        """Stop asking, because this rank leaves.

        Returns:
            A function that returns whether another rank waits for an operation that this rank will never start.
        """
        return self._standoffs.leave()

    def let_end(self, rank: int) -> None:
        """Wait a moment for the lost rank's process to end, if it is a sibling.

        A sibling is a rank that the same process started by multiprocessing as this rank. That parent process, for
        example torch.multiprocessing.spawn, shows the error of the child that ends first. The first child to end should
        be the one that caused the failure. `multiring run` shows that error too, so it is told of the loss first.
        """
        self._control.report_loss(rank)
        pid = self._siblings.get(rank)
        until = time.monotonic() + _SIBLING_S
        while pid is not None and lives(pid) and time.monotonic() < until:
            time.sleep(_SIBLING_PAUSE_S)

    def is_single(self) -> bool:
        """Return whether the program has a single thread, which waits for other ranks."""
        return thread_states().is_single

    def _told(self, rank: int, answer: str | None) -> str:
        now_s = time.monotonic()
        if answer:
            self._latest[rank] = now_s, answer
            return f"is {answer}"
        heard_s, text = self._latest.get(rank, (-_FRESH_S, ""))
        ago_s = now_s - heard_s
        return f"does not answer; {ago_s:.1f} s ago it was {text}" if text and ago_s < _FRESH_S else _NO_ANSWER

    def has_come(self, name: str) -> bool:  # noqa: ARG002 -- part of the interface
        """Return False: this listener has no operations."""
        return False

    def _ask(self, ranks: Sequence[int]) -> dict[int, str | None]:
        question = next(self._numbers)
        answers: dict[int, str] = {}
        with self._heard:
            self._questions[question] = answers
        try:
            payload = question.to_bytes(8, "little")
            asked = [rank for rank in ranks if rank != self._rank and self._send(rank, _ASK, payload)]
            now_s = time.monotonic()
            is_known = all(now_s - self._mute.get(rank, -_FRESH_S) < _FRESH_S for rank in asked)
            deadline_s = now_s + (_PATIENCE_S / 5 if is_known else _PATIENCE_S)
            with self._heard:
                while len(answers) < len(asked) and (left := deadline_s - time.monotonic()) > 0:
                    self._heard.wait(left)
                self._mute = {rank: now_s for rank in asked if rank not in answers}
                return {rank: answers.get(rank) for rank in asked}
        finally:
            with self._heard:
                del self._questions[question]

    def hear(self, notice: ControlMessage) -> None:
        """Answer a question, or store an answer."""
        question = int.from_bytes(notice.payload[:8], "little")
        if notice.tag == _ASK:
            self._send(notice.rank, _ANSWER, notice.payload[:8] + main_place().encode())
        elif notice.tag == _ANSWER:
            with self._heard:
                if question in self._questions:
                    self._questions[question][notice.rank] = notice.payload[8:].decode(errors="replace")
                    self._heard.notify_all()

    def lose(self, rank: int, *, died: bool, why: str) -> None:
        """Stop waiting for the answer of a rank that died or left."""
        with self._heard:
            for answers in self._questions.values():
                answers.setdefault(rank, f"gone: it {'died' if died else 'left'}, {why}")
            self._heard.notify_all()

    def end(self) -> None:
        """Do nothing: open questions end with their time-outs."""

    def _send(self, rank: int, tag: int, payload: bytes) -> bool:
        try:
            return self._control.send(rank, _ADDRESS, tag, payload)
        except StateError:  # the rank accepts no control messages at the moment, or this rank is leaving
            return False
