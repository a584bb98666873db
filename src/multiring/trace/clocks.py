"""Align the clocks of different hosts by ping-pongs.

A ping-pong gives four times: sent here, received there, sent back there, received here. The other clock was ahead by
((received there - sent here) + (sent there - received here)) / 2. The error is at most half of the messages' time:
Mills 1991, "Internet Time Synchronization: the Network Time Protocol", IEEE Trans. Communications 39(10).
The shortest of several ping-pongs is the most accurate. Between a reading at the start and one at the end, the clocks
are assumed to drift evenly.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Stamps = tuple[int, int, int, int]  # ns: sent here, received there, sent there, received here


@dataclass(frozen=True, slots=True)
class ClockReading:
    """Another clock seen from this clock: at `at_ns` it was ahead by `offset_ns`, plus or minus `error_ns`."""

    at_ns: int
    offset_ns: int
    error_ns: int


def best_reading(stamps: Sequence[Stamps]) -> ClockReading:
    """Return the reading of the quickest of these ping-pongs.

    `stamps` has at least one.
    """
    sent, received, replied, back = min(stamps, key=_travelled)
    error = (_travelled((sent, received, replied, back)) + 1) // 2
    return ClockReading((sent + back) // 2, (received - sent + replied - back) // 2, error)


def _travelled(stamps: Stamps) -> int:
    sent, received, replied, back = stamps
    return (back - sent) - (replied - received)


@dataclass(frozen=True, slots=True)
class Alignment:
    """Converts times of one clock to the reference clock.

    Without a reading, times stay as they are.
    """

    start: ClockReading | None = None
    end: ClockReading | None = None

    @property
    def error_ns(self) -> int:
        """The largest error of an aligned time at the readings, in ns."""
        return max((each.error_ns for each in (self.start, self.end) if each is not None), default=0)

    def aligned(self, times_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return these times by the reference clock; their order stays the same.

        Before the first reading and after the last one, the offset is that reading's offset.
        """
        if self.start is None:
            return times_ns
        if self.end is None or self.end.at_ns <= self.start.at_ns:
            return times_ns + self.start.offset_ns
        stretch = self.end.at_ns - self.start.at_ns
        # If one clock seems to run backwards, both readings are bad. Limit the drift so that times keep their order.
        drift = max(self.end.offset_ns - self.start.offset_ns, -stretch)
        passed = np.clip(times_ns - self.start.at_ns, 0, stretch)
        drifted: NDArray[np.int64] = np.floor(passed * (drift / stretch)).astype(np.int64)
        return times_ns + self.start.offset_ns + drifted
