"""The control thread: it receives the control messages of other ranks.

The thread sleeps in the native core until a control message arrives, and uses no CPU time before that. It answers even
if the rank's program is busy or waits. It is started by `init` if there are other ranks, because a program that hangs
could not start it later.
"""

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from multiring._limits.processes import start_thread
from multiring._native import Context, ControlMessage, ControlMessageKind
from multiring.errors import MultiringError, StateError

_log = logging.getLogger("multiring")
_FOR_EVER_S = 1e9
_END_S = 2.0  # how long the end of the process waits for the thread


class Listener(Protocol):
    """A receiver of control messages.

    Its methods run on the control thread and must not block.
    """

    def hear(self, notice: ControlMessage) -> None:
        """Handle a control message, or the report of a mismatch."""

    def has_come(self, name: str) -> bool:
        """Return whether this rank has an operation of this name in flight."""

    def lose(self, rank: int, *, died: bool, why: str) -> None:
        """Handle the loss of a world rank, which died or left."""

    def end(self) -> None:
        """Handle the end of this rank's part in the job.

        No more control messages will arrive.
        """


class Control:
    """The control thread of this rank, its listeners and its timers."""

    def __init__(self, context: Context, on_loss: Callable[[int], None] = lambda _rank: None) -> None:
        self._context = context
        self._on_loss = on_loss
        self._lock = threading.Lock()
        self._listeners: dict[int, Listener] = {}
        self._on_cut_off: Callable[[int], None] | None = None
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._thread = threading.Thread(target=self._run, name="multiring control", daemon=True)

    def start(self) -> None:
        """Start the thread.

        Raises:
            LaunchError: the kernel refuses the thread.
        """
        start_thread(self._thread, "this rank cannot start its control thread")

    def stop(self) -> None:
        """Wait for the thread to end. The native context must be closed already."""
        self._thread.join(_END_S)

    def add(self, group: int, listener: Listener) -> None:
        """Register `listener` for the control messages and mismatches of `group`."""
        with self._lock:
            self._listeners[group] = listener

    def when_cut_off(self, call: Callable[[int], None]) -> None:
        """Call `call` on the control thread with each rank whose host cannot be reached, before the rank is lost."""
        self._on_cut_off = call

    def remove(self, group: int) -> None:
        """Unregister the listener of `group`.

        Later control messages of the group are discarded.
        """
        with self._lock:
            self._listeners.pop(group, None)

    def knows(self, group: int) -> bool:
        """Return whether `group` has a listener."""
        with self._lock:
            return group in self._listeners

    def has_come(self, group: int, name: str) -> bool:
        """Return whether this rank has an operation of this name of `group` in flight."""
        with self._lock:
            listener = self._listeners.get(group)
        return listener is not None and listener.has_come(name)

    def send(self, rank: int, group: int, tag: int, payload: bytes) -> bool:
        """Send a control message to a world rank.

        Returns:
            False if the rank is lost or cannot be reached from this rank.

        Raises:
            StateError: the rank has not accepted earlier control messages yet, or this rank has left the job.
        """
        return self._context.notify(rank, group, tag, payload)

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call `call` on the control thread after `seconds`."""
        with self._lock:
            heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._count), call))
        if threading.current_thread() is not self._thread:
            self._context.wake_control()

    def report_loss(self, rank: int) -> None:
        """Report that `rank` is lost, as the control thread does when it hears of it.

        A caller that is about to raise an error about the loss calls it: the program may end before the thread comes to
        the news, and the launcher would take this rank for the cause.
        """
        self._on_loss(rank)

    def wait_until_handled(self, seconds: float) -> None:
        """Wait until the listeners have got the control messages that have come so far, but at most `seconds`.

        A rank's messages come before the news of its loss. So after an operation has failed because a rank is lost, the
        listeners know all that the rank has said.
        """
        if threading.current_thread() is self._thread or not self._thread.is_alive():
            return
        are_handled = threading.Event()
        # The thread may have taken messages before the last ones came. It takes those before the second call.
        self.after(0.0, lambda: self.after(0.0, are_handled.set))
        are_handled.wait(seconds)

    def _run(self) -> None:
        try:
            while (notices := self._context.take_control_messages(self._patience_s())) is not None:
                for notice in notices:
                    self._hand_on(notice)
                for call in self._due():
                    _guarded(call)
        except MultiringError:
            _log.exception("this rank no longer receives control messages of other ranks")
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
            on_cut_off = self._on_cut_off
            if on_cut_off is not None and notice.is_cut_off:
                _guarded(lambda: on_cut_off(notice.rank))
            for each in self._all():
                _guarded(lambda each=each: each.lose(notice.rank, died=notice.died, why=why))  # type: ignore[misc]
            return
        with self._lock:
            listener = self._listeners.get(notice.group)
        if listener is not None:  # without a listener, the message is for a set that was closed here
            _guarded(lambda: listener.hear(notice))


def _guarded(call: Callable[[], None]) -> None:
    """Call `call` and log any exception.

    So the thread continues to serve the other listeners.
    """
    try:
        call()
    except StateError as error:  # this rank is leaving, or another rank accepts no more control messages
        _log.info("a control message was not handled: %s", error)
    except Exception:  # noqa: BLE001 -- it is logged, and the thread continues
        _log.exception("a control message was not handled")
