"""Spans: stretches of time that a program names, recorded only while a timeline is on."""

import os
import threading
import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple, Protocol

from multiring._forks import ForkSafeLock
from multiring.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable


class Span(NamedTuple):
    """A stretch of a thread's time.

    `kind` is "span", or an adapter's name for it, such as "forward".
    """

    name: str
    kind: str
    start_ns: int
    end_ns: int
    thread: int  # the kernel's number of the thread


class DeviceSlice(NamedTuple):
    """A stretch of a device's time in which it ran an operation of a group.

    Times are ns of the rank's monotonic clock. They are off by at most `error_ns`, all of one reading alike.
    """

    device: int
    group: int
    sequence: int
    start_ns: int
    end_ns: int
    error_ns: int


class Spans:
    """The spans of one process since the timeline began. Any thread may add spans."""

    def __init__(self) -> None:
        self._kept: deque[Span] = deque()
        self._devices: deque[DeviceSlice] = deque()
        self.sources: list[Callable[[Spans, float], None]] = []
        """Functions that add what has happened elsewhere, such as on devices, and wait for it at most so many seconds.

        Only the thread that calls `take` calls them."""

    def add(self, name: str, kind: str, start_ns: int, end_ns: int, thread: int | None = None) -> None:
        """Record a span.

        Args:
            name: the span's name.
            kind: its kind.
            start_ns: its start, from `time.monotonic_ns`.
            end_ns: its end.
            thread: the kernel's number of its thread; by default, that of the calling thread.
        """
        self._kept.append(Span(name, kind, start_ns, end_ns, threading.get_native_id() if thread is None else thread))

    def add_device(self, piece: DeviceSlice) -> None:
        """Record an operation on a device."""
        self._devices.append(piece)

    def take_devices(self) -> list[DeviceSlice]:
        """Return the operations on devices since the last call; only one thread may call this."""
        return [self._devices.popleft() for _ in range(len(self._devices))]

    def take(self) -> list[Span]:
        """Return the spans since the last call; only one thread may call this."""
        taken: list[Span] = []
        while self._kept:
            taken.append(self._kept.popleft())
        return taken


class Follower(Protocol):
    """An adapter that records spans while a timeline is on."""

    def started(self, spans: Spans) -> None:
        """Begin to add spans to `spans`."""

    def stopped(self) -> None:
        """Stop adding spans."""


class _Process:
    def __init__(self) -> None:
        self.lock = ForkSafeLock()
        self.spans: Spans | None = None
        self.followers: list[Follower] = []
        self.is_fork_watched = False


_process = _Process()
_NOTHING = nullcontext()


def span(name: str) -> AbstractContextManager[None]:
    """Return a context manager that records its block under `name`.

    It does nothing if no timeline is on.

    with multiring.trace.span("augment"):
        batch = augment(batch)
    """
    spans = _process.spans
    return _NOTHING if spans is None else _Open(spans, name)


def recorded() -> Spans | None:
    """Return the spans of the timeline that is on, or None if no timeline is on."""
    return _process.spans


def start_spans() -> Spans:
    """Start to record spans, and return their container.

    Raises:
        StateError: this process records spans already.
    """
    with _process.lock:
        if _process.spans is not None:
            raise StateError("this process has a timeline already; stop it first")
        if not _process.is_fork_watched:
            os.register_at_fork(after_in_child=_forget)
            _process.is_fork_watched = True
        _process.spans = spans = Spans()
        for follower in _process.followers:
            follower.started(spans)
    return spans


def stop_spans() -> None:
    """Stop recording spans; the caller can still take recorded spans."""
    with _process.lock:
        if _process.spans is None:
            return
        _process.spans = None
        for follower in _process.followers:
            follower.stopped()


def follow(follower: Follower) -> None:
    """Notify `follower` of the start and end of every timeline, including the current one.

    A second call with the same follower does nothing.
    """
    with _process.lock:
        if follower in _process.followers:
            return
        _process.followers.append(follower)
        if _process.spans is not None:
            follower.started(_process.spans)


def _forget() -> None:
    """Stop recording in a forked child: the timeline belongs to the parent, and no code reads the child's spans."""
    if _process.spans is not None:
        stop_spans()


class _Open:
    """A context manager that records one span."""

    __slots__ = ("_name", "_spans", "_start_ns")

    def __init__(self, spans: Spans, name: str) -> None:
        self._spans = spans
        self._name = name
        self._start_ns = 0

    def __enter__(self) -> None:
        self._start_ns = time.monotonic_ns()

    def __exit__(self, *_: object) -> None:
        self._spans.add(self._name, "span", self._start_ns, time.monotonic_ns())
