"""Where ranks are: what each one's main thread is doing, asked and answered over notices.

A rank that is in an endless loop answers as one that waits does, for its control thread does. One that is stopped, or
held up in code that does not let go of Python's lock, does not.
"""

import itertools
import json
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from multiring._native import Notice
from multiring.errors import StateError
from multiring.runtime.handles import Lookout, Sight, Waiter
from multiring.runtime.notices import Control

_PATIENCE_S = 0.5  # an answer takes a millisecond; no error is to wait much longer for one that does not come
_ADDRESS = 0  # of these notices; groups have random ones
_ASK, _ANSWER, _RELEASE = 0, 1, 2
_FRESH_S = 60.0  # an older answer says nothing any more
_LINES = 3  # of a stack: the innermost
_MOST_CHARACTERS = 2000
_OWN_CODE = str(Path(__file__).parents[1])
_NO_ANSWER = "does not answer: it is stopped, or held up outside Python"


def main_frame() -> FrameType | None:
    """Return the innermost frame of this process's main thread, as it is now."""
    return sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 -- the only way


def waiters_in(frame: FrameType | None) -> list[Waiter]:
    """Return what the thread of `frame`, its innermost, waits for, the innermost wait first."""
    found = []
    while frame is not None:
        waiter = frame.f_locals.get("self") if frame.f_code.co_name == "wait" else None
        if isinstance(waiter, Waiter):
            found.append(waiter)
        frame = frame.f_back
    return found


def described(frame: FrameType | None) -> str:
    """Return where the thread of `frame` is, by the innermost lines that are not multiring's, and what it waits for."""
    summary = [] if frame is None else traceback.extract_stack(frame)
    lines = [
        f"{Path(line.filename).name}:{line.lineno} in {line.name}{f' ({line.line})' if line.line else ''}"
        for line in reversed(summary)
        if not line.filename.startswith((_OWN_CODE, "<frozen"))
    ]
    waiters = waiters_in(frame)
    waits = f", and waits for {waiters[-1].title}" if waiters else ""  # the outermost: what it was started as
    return f"at {', called at '.join(lines[:_LINES])[:_MOST_CHARACTERS] or 'no line of Python'}{waits}"


class Whereabouts(Lookout):
    """Asks other ranks where they are, and answers them. Other threads than the control thread may ask.

    Args:
        control: what carries the questions.
        rank: this one.
        long_s: a rank that has waited for this one for so many seconds waits back.
    """

    def __init__(self, control: Control, rank: int, long_s: float) -> None:
        self._control = control
        self._rank = rank
        self._long_s = long_s
        self._heard = threading.Condition()
        self._questions: dict[int, dict[int, Any]] = {}  # by number: the answers by rank
        self._numbers = itertools.count(1)
        self._mute: dict[int, float] = {}  # ranks that did not answer the last time, and when that was
        self._latest: dict[int, tuple[float, str]] = {}  # by rank: when it said where it was, and where
        control.add(_ADDRESS, self)

    def look(self, ranks: Sequence[int]) -> Sight:
        """Return where these ranks of the world are; what does not answer within a moment is told too."""
        told = self._ask(ranks)
        text = "".join(f"; rank {rank} {self._told(rank, each)}" for rank, each in told.items())
        return Sight(text, [rank for rank, each in told.items() if each and self._waits_back(each)])

    def _told(self, rank: int, answer: Any) -> str:
        now_s = time.monotonic()
        if answer:
            self._latest[rank] = now_s, answer[0]
            return f"is {answer[0]}"
        heard_s, text = self._latest.get(rank, (-_FRESH_S, ""))
        ago_s = now_s - heard_s
        return f"does not answer; {ago_s:.1f} s ago it was {text}" if text and ago_s < _FRESH_S else _NO_ANSWER

    def _waits_back(self, answer: Any) -> bool:
        _, waited_s, place = answer
        return waited_s >= self._long_s and (place is None or not self._control.has_come(*place))

    def has_come(self, name: str) -> bool:  # noqa: ARG002 -- there are none
        """Return False: there are no operations here."""
        return False

    def release(self, rank: int) -> None:
        """Have a rank that waits for this one give up: this one does, as each waits for the other.

        Returns when it has, or a moment later: were this rank to leave first, the other would take that for the cause.
        """
        self._ask([rank], _RELEASE)

    def _ask(self, ranks: Sequence[int], tag: int = _ASK) -> dict[int, Any]:
        question = next(self._numbers)
        answers: dict[int, Any] = {}
        with self._heard:
            self._questions[question] = answers
        try:
            payload = question.to_bytes(8, "little")
            asked = [rank for rank in ranks if rank != self._rank and self._send(rank, tag, payload)]
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

    def hear(self, notice: Notice) -> None:
        """Answer a question, keep an answer, or have the main thread give up."""
        question = int.from_bytes(notice.payload[:8], "little")
        if notice.tag == _ASK:
            frame = main_frame()
            waiter = _waiting(frame, notice.rank)
            waited = (0.0, None) if waiter is None else (waiter.stalled_on()[1], waiter.place)
            answer = [described(frame), *waited]
            self._send(notice.rank, _ANSWER, notice.payload[:8] + json.dumps(answer).encode())
        elif notice.tag == _ANSWER:
            with self._heard:
                if question in self._questions:
                    self._questions[question][notice.rank] = json.loads(notice.payload[8:])
                    self._heard.notify_all()
        elif notice.tag == _RELEASE:
            # What it waits for, it said when it was asked; whom exactly changes from moment to moment.
            waiter = next((each for each in waiters_in(main_frame()) if each.has_label), None)
            if waiter is not None:
                waiter.give_up(notice.rank)
            self._send(notice.rank, _ANSWER, notice.payload[:8] + b"[]")

    def lose(self, rank: int, *, died: bool, why: str) -> None:
        """Wait no longer for a rank that is gone."""
        with self._heard:
            for answers in self._questions.values():
                answers.setdefault(rank, [f"gone: it {'died' if died else 'left'}, {why}", 0.0, None])
            self._heard.notify_all()

    def end(self) -> None:
        """Leave whoever asks to their patience."""

    def _send(self, rank: int, tag: int, payload: bytes) -> bool:
        try:
            return self._control.send(rank, _ADDRESS, tag, payload)
        except StateError:  # it takes nothing; or this rank is leaving
            return False


def _waiting(frame: FrameType | None, rank: int) -> Waiter | None:
    """Return the operation with a label for which the thread waits for `rank`."""
    for each in waiters_in(frame):
        if each.has_label and rank in each.stalled_on()[0]:
            return each
    return None
