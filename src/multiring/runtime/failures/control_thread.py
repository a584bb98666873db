"""The control thread: the one thread of a rank that listens to what other ranks say outside any operation.

It sleeps in the native core until a notice comes, and uses no CPU while none does. It answers for a rank whose program
is busy, or waits: so it runs from `init` on where there are other ranks, since a program that hangs could not start it.
"""

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from multiring._native import Context, ControlMessage, ControlMessageKind
from multiring.errors import MultiringError, StateError

_log = logging.getLogger("multiring")
_FOR_EVER_S = 1e9
_END_S = 2.0  # how long the end of the process waits for what the thread is at


class Listener(Protocol):
    """Whom notices are for. Called on the control thread, which nothing may hold up."""

    def hear(self, notice: ControlMessage) -> None:
        """Act on a message, or on a mismatch."""

    def has_come(self, name: str) -> bool:
        """Return whether this rank has come to an operation of that name, and it has not ended."""

    def lose(self, rank: int, *, died: bool, why: str) -> None:
        """Act on the loss of a rank of the world, which died or left."""

    def end(self) -> None:
        """Act on this rank's leaving the job: nothing comes any more."""


class Control:
    """The control thread of this rank."""

    def __init__(self, context: Context, on_loss: Callable[[int], None] = lambda _rank: None) -> None:
        self._context = context
        self._on_loss = on_loss
        self._lock = threading.Lock()
        self._listeners: dict[int, Listener] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._thread = threading.Thread(target=self._run, name="multiring control", daemon=True)

    def start(self) -> None:
        """Start listening."""
        self._thread.start()

    def stop(self) -> None:
        """Return once the thread has ended; the context is closed."""
        self._thread.join(_END_S)

    def add(self, group: int, listener: Listener) -> None:
        """Have `listener` hear what is sent to `group`, and the mismatches of its operations."""
        with self._lock:
            self._listeners[group] = listener

    def remove(self, group: int) -> None:
        """Drop from now on what is sent to `group`."""
        with self._lock:
            self._listeners.pop(group, None)

    def has_come(self, group: int, name: str) -> bool:
        """Return whether this rank has come to an operation of that name, and it has not ended."""
        with self._lock:
            listener = self._listeners.get(group)
        return listener is not None and listener.has_come(name)

    def send(self, rank: int, group: int, tag: int, payload: bytes) -> bool:
        """Send a notice to a rank of the world; False: it is gone, or cannot be reached from here.

        Raises:
            StateError: the rank does not take what was sent to it before, or this one has left the job.
        """
        return self._context.notify(rank, group, tag, payload)

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call `call` on the control thread in so many seconds."""
        with self._lock:
            heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._count), call))
        if threading.current_thread() is not self._thread:
            self._context.wake_control()

    def _run(self) -> None:
        try:
            while (notices := self._context.take_control_messages(self._patience_s())) is not None:
                for notice in notices:
                    self._hand_on(notice)
                for call in self._due():
                    _guarded(call)
        except MultiringError:
            _log.exception("this rank does not listen to the others any more")
        for listener in self._all():
            _guarded(listener.end)
        with self._lock:
            self._listeners.clear()
            self._timers.clear()

    def _patience_s(self) -> float:
        with self._lock:
            return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else _FOR_EVER_S

    def _due(self) -> list[Callable[[], None]]:
        with self._lock:
            due = []
            while self._timers and self._timers[0][0] <= time.monotonic():
                due.append(heapq.heappop(self._timers)[2])
            return due

    def _all(self) -> list[Listener]:
        with self._lock:
            return list(self._listeners.values())

    def _hand_on(self, notice: ControlMessage) -> None:
        if notice.kind is ControlMessageKind.LOSS:
            why = notice.payload.decode(errors="replace")
            self._on_loss(notice.rank)
            for each in self._all():
                _guarded(lambda each=each: each.lose(notice.rank, died=notice.died, why=why))  # type: ignore[misc]
            return
        with self._lock:
            listener = self._listeners.get(notice.group)
        if listener is not None:  # else of a set that was closed here
            _guarded(lambda: listener.hear(notice))


def _guarded(call: Callable[[], None]) -> None:
    """Call, and go on whatever comes of it: the thread serves others too."""
    try:
        call()
    except StateError as error:  # this rank is leaving, or another one takes nothing any more
        _log.info("a notice was not acted on: %s", error)
    except Exception:  # noqa: BLE001 -- said, and the thread goes on
        _log.exception("a notice was not acted on")
