"""Shares of a loader's batches by the ranks' measured speeds.

A step is measured from the moment in which the program gets a batch to that in which it asks for the next one, without
the time for which the rank waits for other ranks, or for data on its way. The ranks exchange their speeds before every
32nd batch of a pass that they draw.
"""

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING

from multiring._frontend.elastic.speed_shares import counts_by_speed, speeds_now
from multiring._frontend.lifecycle import rank, size
from multiring._frontend.object_collectives import allgather_object
from multiring._runtime import event_reader, is_initialized
from multiring._runtime.tracing.wait_split import rows_of, split_of

if TYPE_CHECKING:
    from multiring._runtime.tracing.event_log import EventReader

EVERY = 32  # batches between two exchanges

_log = logging.getLogger("multiring")


class MeasuredShares:
    """The ranks' shares of the batches of one loader: equal ones at first, then in proportion to the ranks' speeds."""

    def __init__(self) -> None:
        self._speeds: tuple[float, ...] = ()  # of all ranks, in samples per second; the same on all ranks
        self._measured: list[tuple[int, float]] = []  # samples and seconds of this rank's steps since the last exchange
        self._events: EventReader | None = None
        self._began_s = 0.0

    def divide_in(self) -> Callable[[int], Sequence[int]]:
        """Return the function that divides the batches of a pass that begins.

        Every rank calls the function once for each batch, in the same order. It takes the number of samples of the
        batch, and returns how many of them each rank gets.
        """
        if not is_initialized() or size() == 1:
            self._events = None
            return lambda batch: [batch]
        self._events = event_reader()
        numbers = itertools.count()

        def divide(batch: int) -> Sequence[int]:
            if next(numbers) % EVERY == 0:
                self._meet()
            return counts_by_speed(batch, self._speeds)

        return divide

    def begin(self) -> None:
        """Begin to measure a step: the program gets its batch."""
        if self._events is not None:
            self._events.take()  # those of what came before
        self._began_s = time.monotonic()

    def end(self, samples: int) -> None:
        """End the step of a batch with so many samples of this rank: the program asks for the next one."""
        if self._events is None or not samples:
            return
        end_s = time.monotonic()
        split = split_of(rows_of(self._events.take()), self._began_s, end_s)
        self._measured.append((samples, end_s - self._began_s - split.peers_s - split.exposed_s))

    def _meet(self) -> None:
        """Exchange the measured speeds, and set those that determine the shares."""
        told = allgather_object((self._speeds, summed(self._measured)), name="distribute.speeds")
        self._measured.clear()
        # A rank that came in later has not the speeds that the others have.
        former = told[0][0] if all(speeds == told[0][0] for speeds, _ in told) else ()
        speeds = speeds_now(former, [each for _, each in told])
        if speeds != self._speeds and rank() == 0:
            shares = ", ".join(f"{100 * each / sum(speeds):.0f} %" for each in speeds)
            _log.info("distribute: the ranks' shares of each batch are %s, by their speeds", shares)
        self._speeds = speeds


def summed(steps: Sequence[tuple[int, float]]) -> tuple[int, float]:
    """Return the samples of some steps, and the seconds that they need at the median of the steps' speeds.

    One step that takes long, for example because the program saves a checkpoint in it, changes no shares.
    """
    samples = sum(each for each, _ in steps)
    return samples, samples * median(seconds / each for each, seconds in steps) if steps else 0.0
