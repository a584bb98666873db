"""Shares of a batch by the ranks' measured speeds, for machines of different speeds."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from multiring._frontend.lifecycle import rank, size
from multiring.errors import ArgumentError

_GAIN = 0.03  # shares change if a step would be shorter by more than this part; else they would follow noise


class SpeedShares:
    """The ranks' shares of each batch, as an argument of a state. They follow the ranks' speeds at each commit.

        state = ObjectState(..., shares=SpeedShares(), step=0)

        mine = state.shares.part(len(batch))
        with state.shares.computing(len(batch)):
            gradient = gradient_of_mean_loss(batch[mine.start : mine.stop])
        gradient = allreduce(gradient * state.shares.weight(len(batch)))  # the average

    All ranks have equal shares until the first commit, and after the number of ranks has changed until the next one.
    The average of the ranks' weighted gradients of mean losses is the gradient of the mean loss of the whole batch, so
    the losses do not depend on the shares, up to rounding.
    """

    def __init__(self) -> None:
        self._speeds: tuple[float, ...] = ()  # samples per second of each rank; the same on all ranks
        self._samples, self._seconds = 0, 0.0  # what this rank has computed since the last commit

    def parts(self, batch: int) -> tuple[range, ...]:
        """Return by rank the positions of its samples in a batch.

        Args:
            batch: the number of samples of the batch, on all ranks together.

        Raises:
            ArgumentError: the batch has no samples.
        """
        ranks = size()
        counts = counts_by_speed(batch, self._speeds if len(self._speeds) == ranks else (1.0,) * ranks)
        ends = [sum(counts[: at + 1]) for at in range(ranks)]
        return tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))

    def part(self, batch: int) -> range:
        """Return the positions of this rank's samples in a batch; see `parts`."""
        return self.parts(batch)[rank()]

    def weight(self, batch: int) -> float:
        """Return the factor for this rank's mean over its samples, before the ranks' means are averaged."""
        return len(self.part(batch)) * size() / batch

    @contextlib.contextmanager
    def computing(self, batch: int) -> Iterator[None]:
        """Measure this rank's speed in the block, which computes on its part of a batch.

        The block must not wait for other ranks, or their speeds would seem to be alike.
        """
        began_s = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - began_s
        self._samples += len(self.part(batch))

    def meet(self, gather: Any) -> None:
        """Exchange the measured speeds, and change the shares; every rank calls it at a commit."""
        told: list[tuple[int, float]] = gather((self._samples, self._seconds))
        self._samples, self._seconds = 0, 0.0
        self._speeds = speeds_now(self._speeds, told)


def speeds_now(former: Sequence[float], told: Sequence[tuple[int, float]]) -> tuple[float, ...]:
    """Return the ranks' speeds in samples per second, which determine the shares.

    Args:
        former: the speeds so far; of another number of ranks if this has changed.
        told: by rank, how many samples it has computed since, and in how many seconds.
    """
    is_known = len(former) == len(told)
    if any(samples == 0 or seconds <= 0 for samples, seconds in told):
        return tuple(former) if is_known else (1.0,) * len(told)
    measured = tuple(samples / seconds for samples, seconds in told)
    shares = former if is_known else (1.0,) * len(told)
    # A step takes as long as the rank that needs longest for its share.
    now_s = max(share / speed for share, speed in zip(shares, measured, strict=True)) / sum(shares)
    best_s = 1.0 / sum(measured)
    return tuple(shares) if best_s > (1.0 - _GAIN) * now_s else measured


def counts_by_speed(batch: int, speeds: Sequence[float]) -> list[int]:
    """Return how many samples of a batch each rank gets, in proportion to its speed.

    Each rank gets at least one if there are enough, so that its speed is known.

    Raises:
        ArgumentError: the batch has no samples.
    """
    if batch < 1:
        raise ArgumentError(f"a batch of {batch} samples: want at least one")
    ranks, total = len(speeds), sum(speeds)
    least = min(1, batch // ranks)
    rest = batch - least * ranks
    wanted = [max(0.0, batch * speed / total - least) for speed in speeds]
    wanted = [each * rest / max(sum(wanted), 1e-300) for each in wanted]
    counts = [int(each) for each in wanted]
    # What is left over goes to the largest remainders, and of equal ones to the lower rank.
    order = sorted(range(ranks), key=lambda at: (counts[at] - wanted[at], at))
    for at in order[: rest - sum(counts)]:
        counts[at] += 1
    return [least + each for each in counts]
