"""Where ranks are: what each one's main thread is doing, asked and answered over notices.

A rank that is in an endless loop answers as one that waits does, for its control thread does. One that is stopped, or
held up in code that does not let go of Python's lock, does not.
"""

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from multiring._native import ControlMessage
from multiring.errors import StateError
from multiring.runtime.bootstrap.rank_process import lives
from multiring.runtime.failures.control_thread import Control
from multiring.runtime.failures.standoffs import Counted, Standoffs
from multiring.runtime.group.handles import Lookout, Patience, Waiter
from multiring.runtime.job.threads import main_place, thread_states

_PATIENCE_S = 0.5  # an answer takes a millisecond; no error is to wait much longer for one that does not come
_ADDRESS = 0  # of these notices; groups have random ones
_ASK, _ANSWER = 0, 1
_SIBLING_S, _SIBLING_PAUSE_S = 1.5, 0.01
_FRESH_S = 60.0  # an older answer says nothing any more
_NO_ANSWER = "does not answer: it is stopped, or held up outside Python"


class RankStatus(Lookout):
    """Asks other ranks where they are, and answers them. Other threads than the control thread may ask.

    Args:
        control: what carries the questions.
        rank: this one.
        stall_warn_s: after so many seconds a silent rank is warned of.
        siblings: the processes of ranks that one process has started by multiprocessing, as it has this one.
    """

    def __init__(self, control: Control, rank: int, stall_warn_s: float, siblings: Mapping[int, int]) -> None:
        self._siblings = siblings
        self._control = control
        self._rank = rank
        self.patience = Patience.of(stall_warn_s)
        self._standoffs = Standoffs(control, rank, self.patience.sure_s)
        self._heard = threading.Condition()
        self._questions: dict[int, dict[int, str]] = {}  # by number: the answers by rank
        self._numbers = itertools.count(1)
        self._mute: dict[int, float] = {}  # ranks that did not answer the last time, and when that was
        self._latest: dict[int, tuple[float, str]] = {}  # by rank: when it said where it was, and where
        control.add(_ADDRESS, self)

    def look(self, ranks: Sequence[int]) -> str:
        """Return where these ranks of the world are; what does not answer within a moment is told too."""
        return "".join(f"; rank {rank} {self._told(rank, each)}" for rank, each in self._ask(ranks).items())

    def know(self, group: Counted) -> None:
        """Take note of a group of this process, its `id` and the number of its `last` operation."""
        self._standoffs.know(group)

    def seek(self, waiter: Waiter) -> None:
        """Find out whether those that this thread waits for in `waiter` wait for this rank; see standoffs.py."""
        self._standoffs.seek(waiter)

    def leave(self) -> Callable[[], bool]:
        """Seek nothing any more. Return what tells whether another rank waits for what this one will not come to."""
        return self._standoffs.leave()

    def let_end(self, rank: int) -> None:
        """Wait a moment until a lost rank has ended, where one process started both by multiprocessing.

        That process, as torch.multiprocessing.spawn, shows the error of whichever ends first: the cause has to.
        """
        pid = self._siblings.get(rank)
        until = time.monotonic() + _SIBLING_S
        while pid is not None and lives(pid) and time.monotonic() < until:
            time.sleep(_SIBLING_PAUSE_S)

    def is_single(self) -> bool:
        """Return whether this process's program has one thread, and it waits for other ranks."""
        return thread_states().is_single

    def _told(self, rank: int, answer: str | None) -> str:
        now_s = time.monotonic()
        if answer:
            self._latest[rank] = now_s, answer
            return f"is {answer}"
        heard_s, text = self._latest.get(rank, (-_FRESH_S, ""))
        ago_s = now_s - heard_s
        return f"does not answer; {ago_s:.1f} s ago it was {text}" if text and ago_s < _FRESH_S else _NO_ANSWER

    def has_come(self, name: str) -> bool:  # noqa: ARG002 -- there are none
        """Return False: there are no operations here."""
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
        """Answer a question, or keep an answer."""
        question = int.from_bytes(notice.payload[:8], "little")
        if notice.tag == _ASK:
            self._send(notice.rank, _ANSWER, notice.payload[:8] + main_place().encode())
        elif notice.tag == _ANSWER:
            with self._heard:
                if question in self._questions:
                    self._questions[question][notice.rank] = notice.payload[8:].decode(errors="replace")
                    self._heard.notify_all()

    def lose(self, rank: int, *, died: bool, why: str) -> None:
        """Wait no longer for a rank that is gone."""
        with self._heard:
            for answers in self._questions.values():
                answers.setdefault(rank, f"gone: it {'died' if died else 'left'}, {why}")
            self._heard.notify_all()

    def end(self) -> None:
        """Leave whoever asks to their patience."""

    def _send(self, rank: int, tag: int, payload: bytes) -> bool:
        try:
            return self._control.send(rank, _ADDRESS, tag, payload)
        except StateError:  # it takes nothing; or this rank is leaving
            return False
