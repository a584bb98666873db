"""When a device ran operations, for timelines: the device's own times, on the host's clock.

The device's thread records an event before and after each operation. Four times a second, the timeline's thread reads
the events that have happened. It also has an idle stream come to an anchor, an event whose time the host sees: between
the call and the first look that finds it done. The times between the anchor and the operations' events are the device's
own. The anchor is new for each reading, so that the two clocks do not drift apart, and CUDA's 32 bits of milliseconds
are exact. Neither the program's threads nor the device's wait for a reading.

Several ranks: verified without GPUs only (docs/decisions/0115-nccl-engine.md).
"""

import logging
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from multiring._runtime.engines.cuda_driver import CudaDriver, CudaError, CudaEvent
from multiring.trace import DeviceSlice, Spans, follow, recorded

if TYPE_CHECKING:
    from ctypes import c_void_p

_log = logging.getLogger("multiring")
_PINGS = 8  # anchors of one reading at most; the one whose time the host knows best counts
_GOOD_NS = 10_000  # no other anchor is taken if the host knows the time so well
_SPIN_S = 2e-4  # the host polls an anchor without a pause for so long
_PAUSE_S = 1e-4
_MOST_S = 0.1  # how long a reading waits for an anchor; the next reading tries again


class _Timed(NamedTuple):
    """An operation that the device has done."""

    key: tuple[int, int]  # of its group, and its number there
    first: CudaEvent
    last: CudaEvent


class _Anchor(NamedTuple):
    """A moment on both clocks."""

    event: CudaEvent
    at_ns: int  # of the host's monotonic clock
    error_ns: int


class DeviceTimes:
    """The times of one device's operations while a timeline is recorded.

    Only the device's thread calls `events`, `done` and `lost`; only the timeline's thread calls `read`.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._stream: c_void_p | None = None  # of the anchors
        self._done: deque[_Timed] = deque()
        self._open = 0  # timed operations that the device has not done
        _devices.add(self)

    def events(self) -> tuple[CudaEvent, CudaEvent] | None:
        """Return the events before and after the next operation; None if no timeline is recorded."""
        if recorded() is None:
            return None
        found = self._driver.new_event(is_timed=True), self._driver.new_event(is_timed=True)
        self._open += 1
        return found

    def done(self, key: tuple[int, int], events: tuple[CudaEvent, CudaEvent]) -> None:
        """Keep the times of an operation that the device has done."""
        self._done.append(_Timed(key, *events))
        self._open -= 1

    def lost(self) -> None:
        """Forget the events of an operation that has failed."""
        self._open -= 1

    def read(self, spans: Spans, patience_s: float) -> None:
        """Add the operations that the device has done to `spans`.

        Args:
            spans: the timeline.
            patience_s: how long to wait for the operations that the device still does.
        """
        until_s = time.monotonic() + patience_s
        while self._open and time.monotonic() < until_s:
            time.sleep(_PAUSE_S)
        if not self._done:
            return
        try:
            self._driver.enter()
            with self._driver.ignoring_captures():
                anchor = self._anchor()
                if anchor is not None:
                    self._add_to(spans, anchor)
                elif patience_s:
                    _log.warning(
                        "the timeline lacks the times of %d operations on cuda:%d, which does not answer",
                        len(self._done),
                        self._driver.device,
                    )
        except CudaError as error:  # it fails the operations, too
            _log.warning("the timeline lacks the times of operations on cuda:%d: %s", self._driver.device, error)
            self._done.clear()

    def _add_to(self, spans: Spans, anchor: _Anchor) -> None:
        for _ in range(len(self._done)):  # later ones come behind the anchor
            timed = self._done.popleft()
            end_ns = anchor.at_ns - round(self._driver.elapsed_ms(timed.last, anchor.event) * 1e6)
            start_ns = end_ns - round(self._driver.elapsed_ms(timed.first, timed.last) * 1e6)
            spans.add_device(DeviceSlice(self._driver.device, *timed.key, start_ns, end_ns, anchor.error_ns))

    def _anchor(self) -> _Anchor | None:
        """Return an anchor; None if the device does not come to one soon."""
        if self._stream is None:
            self._stream = self._driver.new_stream()
        best: _Anchor | None = None
        for _ in range(_PINGS):
            event = self._driver.new_event(is_timed=True)
            began_ns = time.monotonic_ns()
            self._driver.record(self._stream, event)
            while not self._driver.has_happened(event):
                waited_s = (time.monotonic_ns() - began_ns) * 1e-9
                if waited_s > _MOST_S:
                    return best
                if waited_s > _SPIN_S:
                    time.sleep(_PAUSE_S)
            error_ns = (time.monotonic_ns() - began_ns + 1) // 2
            if best is None or error_ns < best.error_ns:
                best = _Anchor(event, began_ns + error_ns, error_ns)
            if error_ns <= _GOOD_NS:
                break
        return best


class _Devices:
    """All devices of this process; see Follower."""

    def __init__(self) -> None:
        self._known: weakref.WeakSet[DeviceTimes] = weakref.WeakSet()

    def add(self, times: DeviceTimes) -> None:
        self._known.add(times)
        follow(self)

    def started(self, spans: Spans) -> None:
        spans.sources.append(self._read)

    def stopped(self) -> None:
        pass

    def _read(self, spans: Spans, patience_s: float) -> None:
        for each in list(self._known):
            each.read(spans, patience_s)


_devices = _Devices()
