"""Clocks of different hosts, made one by ping-pongs.

A ping-pong gives four times: sent here, received there, sent back there, received here. The other clock was ahead by
((received there - sent here) + (sent there - received here)) / 2, wrong by at most half of what the messages took:
Mills 1991, "Internet Time Synchronization: the Network Time Protocol", IEEE Trans. Communications 39(10). The shortest
of several says most. Between a reading at the start and one at the end the clocks are taken to drift evenly.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Stamps = tuple[int, int, int, int]  # ns: sent here, received there, sent there, received here


@dataclass(frozen=True, slots=True)
class Reading:
    """Another clock seen from this one: at `at_ns` it was ahead by `offset_ns`, give or take `error_ns`."""

    at_ns: int
    offset_ns: int
    error_ns: int


def best_reading(stamps: Sequence[Stamps]) -> Reading:
    """Return what the quickest of these ping-pongs, at least one, says."""
    sent, received, replied, back = min(stamps, key=_travelled)
    error = (_travelled((sent, received, replied, back)) + 1) // 2
    return Reading((sent + back) // 2, (received - sent + replied - back) // 2, error)


def _travelled(stamps: Stamps) -> int:
    sent, received, replied, back = stamps
    return (back - sent) - (replied - received)


@dataclass(frozen=True, slots=True)
class Alignment:
    """How to turn times of one clock into the reference's. Without a reading they are the reference's already."""

    start: Reading | None = None
    end: Reading | None = None

    @property
    def error_ns(self) -> int:
        """How far off an aligned time may be at the readings."""
        return max((each.error_ns for each in (self.start, self.end) if each is not None), default=0)

    def aligned(self, times_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return these times by the reference's clock; they keep their order.

        Before the first reading and behind the last the offset is theirs.
        """
        if self.start is None:
            return times_ns
        if self.end is None or self.end.at_ns <= self.start.at_ns:
            return times_ns + self.start.offset_ns
        stretch = self.end.at_ns - self.start.at_ns
        # A clock that runs backwards beside another is two bad readings: no time may overtake a later one.
        drift = max(self.end.offset_ns - self.start.offset_ns, -stretch)
        passed = np.clip(times_ns - self.start.at_ns, 0, stretch)
        drifted: NDArray[np.int64] = np.floor(passed * (drift / stretch)).astype(np.int64)
        return times_ns + self.start.offset_ns + drifted
