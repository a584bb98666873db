"""Samples that cannot be read are left out of their batch: what is left of it, and what that counts for."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from multiring.data.dataset import Samples
from multiring.data.feeding.batches import Failure, Layout, Wanted, layout_of, made_of, wanted_by
from multiring.data.progress import Step
from multiring.data.readers.opening import tell
from multiring.data.shares import Share
from multiring.errors import DataError

Batch = dict[str, Any]
# Given how many samples this rank has: how many all have, and how many the rank has that has fewest.
Count = Callable[[int], tuple[int, int]]
MOST = 1000  # samples one after the other that cannot be read: then it is the source that fails


class LeavingOut:
    """Takes samples that cannot be read out of a rank's batches.

    Attributes:
        skipped: how many samples have been left out.
        count: adds up the samples that ranks have left; every rank has to call it with each batch. None where ranks do
            not tell each other.

    Args:
        samples: the data set.
    """

    def __init__(self, samples: Samples) -> None:
        self.skipped = 0
        self.count: Count | None = None
        self._samples = samples
        self._substitute: Batch | None = None
        self._in_a_row = 0

    def rest(self, step: Step, batch: Batch, failures: Sequence[Failure]) -> tuple[Batch | None, Share]:
        """Return what is left of a batch, and this rank's share of what all ranks have left.

        The batch is None where no rank has a sample left. A rank that has none beside others that have some gets one
        row of another sample, which counts for nothing, as where a batch has fewer samples than there are ranks.

        Where ranks do not tell each other what they left out, samples count as if all of the batch could be read: each
        of them alike, on whatever rank it is.

        Raises:
            DataError: 1,000 samples one after the other cannot be read.
        """
        for each in failures:
            tell(f"left out: {each.text}")
        self.skipped += len(failures)
        left = max(0, step.share.samples - len(failures))
        planned = step.share.total if step.share.ranks > 1 else left
        total, least = (planned, min(left, step.share.least)) if self.count is None else self.count(left)
        if failures:
            batch = self._without(batch, failures)
        if left or not failures:
            self._in_a_row = 0
            self._substitute = {name: value[:1].copy() for name, value in batch.items()}
        else:
            self._in_a_row += len(failures)
            if self._in_a_row >= MOST:
                raise DataError(
                    f"{self._in_a_row} samples one after the other cannot be read: want a source that answers, even "
                    f"with skip_bad=True; the last: {failures[-1].text}"
                )
        if not total:
            return None, step.share
        if not left and failures:
            batch = self._substitute = self._substitute or self._found(step)
        return batch, replace(step.share, samples=left, total=total, least=least)

    @staticmethod
    def _without(batch: Batch, failures: Sequence[Failure]) -> Batch:
        rows = max((len(value) for value in batch.values()), default=0)
        keep = np.ones(rows, bool)
        keep[[each.row for each in failures]] = False
        return {
            name: value[keep] if isinstance(value, np.ndarray) else [value[i] for i in np.flatnonzero(keep)]
            for name, value in batch.items()
        }

    def _found(self, step: Step) -> Batch:
        """Return a batch of one sample that can be read."""
        failure: Exception | None = None
        for wanted in single_samples(self._samples, wanted_by(self._samples, step)):
            try:
                return made_of(self._samples, wanted)
            except (DataError, OSError) as error:
                failure = failure or error
        raise none_readable(failure)


def single_samples(samples: Samples, wanted: Wanted) -> Iterator[Wanted]:
    """Yield the samples of a batch one by one, and then those that follow in the epoch, up to `MOST`."""
    for index in range(len(wanted.numbers)):
        yield wanted.piece(index, index + 1)
    places = np.arange(wanted.begin, min(wanted.begin + MOST, samples.order.length))
    numbers = samples.order.samples(wanted.epoch, places)
    following = replace(wanted, numbers=numbers, places=None if wanted.places is None else places)
    for index in range(len(numbers)):
        yield following.piece(index, index + 1)


def first_layout(samples: Samples, wanted: Wanted, *, skip_bad: bool) -> Layout:
    """Return how samples lie in a batch, by the first one of it; with `skip_bad`, the first one that can be read.

    Raises:
        DataError: it cannot be read, or none of `MOST` can.
    """
    failure: Exception | None = None
    for each in single_samples(samples, wanted):
        try:
            return layout_of(samples.sample(int(each.numbers[0]), each.epoch, each.draw(0)))
        except (DataError, OSError) as error:
            if not skip_bad:
                raise
            failure = failure or error
    raise none_readable(failure)


def none_readable(failure: Exception | None) -> DataError:
    """Return the error of a data set of which no sample can be read."""
    if failure is None:
        return DataError("a batch without samples")
    return DataError(f"not one of the next samples, up to {MOST}, can be read; the first: {failure}")
