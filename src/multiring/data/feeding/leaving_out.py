"""Leave unreadable samples out of their batch, and compute the weight of the remaining samples."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from multiring.data.dataset import Samples
from multiring.data.feeding.batches import BatchLayout, SampleFailure, layout_of, made_of, wanted_by
from multiring.data.feeding.wanted import WantedSamples
from multiring.data.progress import Step
from multiring.data.readers.opening import tell
from multiring.data.shares import Share
from multiring.errors import DataError

Batch = dict[str, Any]
# Called with this rank's number of samples. It returns the sum and the minimum of all ranks' numbers.
Count = Callable[[int], tuple[int, int]]
_COMPARED = 7  # samples whose fields and shapes are compared
MOST = 1000  # consecutive unreadable samples after which the source is considered broken


class LeavingOut:
    """Removes unreadable samples from a rank's batches.

    Attributes:
        skipped: how many samples have been left out.
        count: adds up the ranks' remaining samples; every rank must call it for each batch. None if the ranks do not
            exchange these numbers.

    Args:
        samples: the data set.
    """

    def __init__(self, samples: Samples) -> None:
        self.skipped = 0
        self.count: Count | None = None
        self._samples = samples
        self._substitute: Batch | None = None
        self._in_a_row = 0

    def rest(self, step: Step, batch: Batch, failures: Sequence[SampleFailure]) -> tuple[Batch | None, Share]:
        """Return a batch without its unreadable samples, and this rank's new share.

        The batch is None if no rank has a sample left. If only this rank has no sample left, the batch has one row of
        another sample, with weight 0. The same happens if a batch has fewer samples than ranks.

        If the ranks do not exchange their numbers (`count` is None), the share is computed as if all ranks could read
        all their samples. Each sample then has the same weight on every rank.

        Raises:
            DataError: 1,000 consecutive samples cannot be read.
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
                    f"{self._in_a_row} consecutive samples cannot be read, too many even for skip_bad=True: check that "
                    f"the source answers; the last failure: {failures[-1].text}"
                )
        if not total:
            return None, step.share
        if not left and failures:
            batch = self._substitute = self._substitute or self._found(step)
        return batch, replace(step.share, samples=left, total=total, least=least)

    @staticmethod
    def _without(batch: Batch, failures: Sequence[SampleFailure]) -> Batch:
        rows = max((len(value) for value in batch.values()), default=0)
        keep = np.ones(rows, bool)
        keep[[each.row for each in failures]] = False
        return {
            name: value[keep] if isinstance(value, np.ndarray) else [value[i] for i in np.flatnonzero(keep)]
            for name, value in batch.items()
        }

    def _found(self, step: Step) -> Batch:
        """Return a batch of the next sample that can be read."""
        failure: Exception | None = None
        for wanted in single_samples(self._samples, wanted_by(self._samples, step)):
            try:
                return made_of(self._samples, wanted)
            except (DataError, OSError) as error:
                failure = failure or error
        raise none_readable(failure)


def single_samples(samples: Samples, wanted: WantedSamples) -> Iterator[WantedSamples]:
    """Yield a batch's samples one by one, and then the epoch's next samples.

    The second part begins at the batch's first position in the epoch, and has at most `MOST` samples.
    """
    for index in range(len(wanted.numbers)):
        yield wanted.piece(index, index + 1)
    places = np.arange(wanted.begin, min(wanted.begin + MOST, samples.order.length))
    numbers = samples.order.samples(wanted.epoch, places)
    following = replace(wanted, numbers=numbers, places=None if wanted.places is None else places)
    for index in range(len(numbers)):
        yield following.piece(index, index + 1)


def first_layout(samples: Samples, wanted: WantedSamples, *, skip_bad: bool) -> BatchLayout:
    """Return the layout of a batch, determined by its first sample.

    Args:
        samples: the data set.
        wanted: the batch's samples.
        skip_bad: whether unreadable samples are skipped. The layout is then that of most of the first samples. If a
            single sample determined it, and this sample lacked a field, all other samples would be left out.

    Raises:
        DataError: the first sample cannot be read; or, with `skip_bad`, none of the next samples, up to `MOST`.
    """
    failure: Exception | None = None
    found: list[BatchLayout] = []
    for each in single_samples(samples, wanted):
        try:
            found.append(layout_of(samples.sample(int(each.numbers[0]), each.epoch, each.draw(0))))
        except (DataError, OSError) as error:
            if not skip_bad:
                raise
            failure = failure or error
        if len(found) == (_COMPARED if skip_bad else 1):
            break
    if not found:
        raise none_readable(failure)
    forms = [_form(each) for each in found]
    return found[forms.index(max(forms, key=forms.count))]  # of equally frequent forms, the first


def _form(layout: BatchLayout) -> tuple[Any, ...]:
    """Return what samples of one batch must have in common."""
    shapes = sorted((name, shape) for name, (shape, _) in layout.arrays.items())
    return (shapes, sorted(layout.lists))


def none_readable(failure: Exception | None) -> DataError:
    """Return the error for a batch if neither its samples nor the next samples can be read."""
    if failure is None:
        return DataError("the batch has no samples")
    return DataError(f"none of the next samples (at most {MOST}) can be read; the first failure: {failure}")
