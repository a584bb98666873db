"""The samples of each step on each rank, and the progress of a training, counted in samples.

A step takes the next `batch` samples of the epoch's order; the last step of an epoch may have fewer. Rank r of p has
the step's samples r, r + p, ..., as in `shares`. The progress within an epoch is therefore one number, and a training
can resume from it on any number of ranks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from multiring.data.orders import Order
from multiring.data.permutation import Numbers
from multiring.data.shares import Share, positions_by_counts
from multiring.errors import ArgumentError

FORMAT = 2
_FIRST = 1  # the format of version 0.2.0, which does not record the order
_BLOCK = 8192  # samples whose numbers are computed at once


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The progress of a training.

    As JSON it has about 150 bytes, for any number of samples, ranks and workers.

    The progress is valid for one data set and one order. `digest` covers the names, sizes and sample counts of the data
    set's shards. `order` covers everything that determines the position of each sample. Neither covers the samples'
    contents.
    """

    seed: int
    epoch: int = 0
    samples: int = 0  # samples of the epoch in committed steps
    digest: str = ""  # digest of the data set's shards
    order: str = ""  # digest of the order

    @classmethod
    def beginning(cls, samples: Any) -> "Progress":
        """Return the progress at the start of a training.

        Args:
            samples: the training's Dataset, Mixture or similar object.
        """
        return cls(seed=samples.seed, digest=samples.digest, order=samples.order.digest)

    def state_dict(self) -> dict[str, Any]:
        """Return the progress as a dict for a checkpoint."""
        told = {"epoch": self.epoch, "samples": self.samples, "seed": self.seed}
        return {"format": FORMAT, **told, "dataset": self.digest, "order": self.order}

    def resumed(self, state: Mapping[str, Any], length: int) -> "Progress":
        """Return the progress that `state` holds.

        Args:
            state: a result of `state_dict`. The number of ranks, the number of workers and the batch size may differ.
            length: samples of the data set's epoch.

        Raises:
            ArgumentError: `state` is not a result of `state_dict`, or has another data set, order or seed.
        """
        if not isinstance(state, Mapping):
            raise ArgumentError(f"state of a data set: it is a {type(state).__name__}; want a state from state_dict")
        wanted = {"format": int, "epoch": int, "samples": int, "seed": int, "dataset": str}
        if state.get("format") == FORMAT:
            wanted["order"] = str
        for name, kind in wanted.items():
            if not isinstance(state.get(name), kind):
                raise ArgumentError(f"state of a data set: {name} is {state.get(name)!r}; want a state from state_dict")
        if state["format"] not in {_FIRST, FORMAT}:
            raise ArgumentError(
                f"state of a data set in format {state['format']}, want {FORMAT}: was it saved by another version?"
            )
        if self.digest != state["dataset"]:
            raise ArgumentError(
                f"the state has data set {state['dataset'] or '(none)'}, but this is {self.digest or '(none)'}: the "
                "samples differ, or are in other shards; want the data set with which the training began"
            )
        if self.seed != state["seed"]:
            raise ArgumentError(
                f"the state has seed {state['seed']}, but this data set has {self.seed}: want the seed of the state"
            )
        # States of version 0.2.0 have no order. The order of a Mixture has changed since then; its old states are
        # rejected above, because its data set's digest has changed too.
        if self.order != state.get("order", self.order):
            raise ArgumentError(
                f"the state has order {state['order']}, but this data set has {self.order}: the shuffle, the window, "
                "the number of samples or the weights differ; want the order with which the training began"
            )
        if state["epoch"] < 0 or not 0 <= state["samples"] <= length:
            raise ArgumentError(
                f"state of epoch {state['epoch']}, {state['samples']} samples: want an epoch of 0 or more, and 0 to "
                f"{length} samples"
            )
        return replace(self, epoch=state["epoch"], samples=state["samples"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A step's samples on one rank."""

    epoch: int
    begin: int  # position in the epoch at which the global batch begins
    end: int  # position at which the global batch ends: the number of finished samples of the epoch after this step
    share: Share
    places: Numbers  # positions of this rank's samples in the epoch, int64 (samples,)
    samples: Numbers  # numbers of these samples, int64 (samples,)


def steps(order: Order, batch: int, *, epoch: int = 0, begin: int = 0, rank: int = 0, ranks: int = 1) -> Iterator[Step]:
    """Yield a rank's steps of an epoch, from sample `begin` on.

    Args:
        order: the order of the samples.
        batch: samples of a step, on all ranks together.
        epoch: the epoch's number.
        begin: samples of the epoch that are already done.
        rank: the rank whose samples are returned.
        ranks: the number of ranks. If a batch has fewer samples than ranks, the last ranks have no sample in it.

    Raises:
        ArgumentError: `batch` is below 1, `rank` is not in 0 ... `ranks` - 1, or `epoch` or `begin` is negative.
    """
    if batch < 1 or not 0 <= rank < ranks or begin < 0 or epoch < 0:
        raise ArgumentError(
            f"batch {batch}, rank {rank} of {ranks}, epoch {epoch} from {begin}: want a batch of 1 or more, a rank "
            "from 0 to below the number of ranks, and an epoch and a beginning of 0 or more"
        )
    own = len(range(rank, batch, ranks))  # this rank's samples of a full batch
    # Computing an order is cheap for many samples at once, so this loop takes several steps at a time.
    together = max(1, _BLOCK // max(1, own))
    whole = Share(samples=own, total=batch, ranks=ranks, least=batch // ranks)
    places: Numbers
    while (count := min(together, (order.length - begin) // batch)) > 0:
        begins = begin + batch * np.arange(count, dtype=np.int64)
        places = begins[:, None] + np.arange(rank, batch, ranks)
        samples = order.samples(epoch, places.reshape(-1)).reshape(places.shape)
        for first, of_step, found in zip(begins.tolist(), places, samples, strict=True):
            yield Step(epoch=epoch, begin=first, end=first + batch, share=whole, places=of_step, samples=found)
        begin += count * batch
    if begin < order.length:
        total = order.length - begin
        places = np.arange(begin + rank, order.length, ranks)
        share = Share(samples=len(places), total=total, ranks=ranks, least=total // ranks)
        found = order.samples(epoch, places)
        yield Step(epoch=epoch, begin=begin, end=order.length, share=share, places=places, samples=found)


def steps_by_counts(
    order: Order, batch: int, counts_of: Callable[[int], Sequence[int]], *, epoch: int, begin: int, rank: int
) -> Iterator[Step]:
    """Yield a rank's steps of an epoch, from sample `begin` on, with parts of given sizes.

    Args:
        order: the order of the samples.
        batch: samples of a step, on all ranks together.
        counts_of: given the number of samples of the next step, returns how many of them each rank gets. It is called
            once for each step, in the order of the steps.
        epoch: the epoch's number.
        begin: samples of the epoch that are already done.
        rank: the rank whose samples are returned.
    """
    for first in range(begin, order.length, batch):
        total = min(batch, order.length - first)
        counts = counts_of(total)
        places = first + positions_by_counts(counts, rank)
        share = Share(samples=len(places), total=total, ranks=len(counts), least=min(counts))
        samples = order.samples(epoch, places)
        yield Step(epoch=epoch, begin=first, end=first + total, share=share, places=places, samples=samples)
