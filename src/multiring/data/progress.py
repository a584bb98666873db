"""Which samples a step has, on which rank, and how far a training is: counted in samples that were trained on.

A step's samples are a piece of the epoch's order, `batch` long; the last of an epoch may be shorter. Rank r of p has
samples r, r + p, ... of it, as in `shares`. So what is done of an epoch is a number, and any number of ranks goes on
from it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from multiring.data.orders import Order
from multiring.data.permutation import Numbers
from multiring.data.shares import Share
from multiring.errors import ArgumentError

FORMAT = 2
_FIRST = 1  # it did not say of which order it is
_BLOCK = 8192  # samples that are looked up at once


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a training is. As JSON about 150 bytes, however many samples, ranks and workers there are.

    A state belongs to a data set and to an order of it. `digest` says what the data set is, as far as an order depends
    on it: the names, sizes and numbers of samples of its shards. `order` says everything that decides which sample
    stands where. What samples contain is in neither.
    """

    seed: int
    epoch: int = 0
    samples: int = 0  # of the epoch, by committed steps
    digest: str = ""  # of the data set: what its order is an order of
    order: str = ""  # digest of the order

    @classmethod
    def beginning(cls, samples: Any) -> "Progress":
        """Return the progress of a training that begins on `samples`, a Dataset, a Mixture or the like."""
        return cls(seed=samples.seed, digest=samples.digest, order=samples.order.digest)

    def state_dict(self) -> dict[str, Any]:
        """Return it for a checkpoint."""
        told = {"epoch": self.epoch, "samples": self.samples, "seed": self.seed}
        return {"format": FORMAT, **told, "dataset": self.digest, "order": self.order}

    def resumed(self, state: Mapping[str, Any], length: int) -> "Progress":
        """Return what `state` says.

        Args:
            state: of `state_dict`, perhaps with another number of ranks, workers or another batch.
            length: of the data set's epoch, in samples.

        Raises:
            ArgumentError: it is none, or of another data set, order or seed.
        """
        wanted = {"format": int, "epoch": int, "samples": int, "seed": int, "dataset": str}
        if state.get("format") == FORMAT:
            wanted["order"] = str
        for name, kind in wanted.items():
            if not isinstance(state.get(name), kind):
                raise ArgumentError(
                    f"state of a data set: {name} is {state.get(name)!r}, want what state_dict returned"
                )
        if state["format"] not in {_FIRST, FORMAT}:
            raise ArgumentError(f"state of a data set in format {state['format']}, want {FORMAT}: of another version?")
        if self.digest != state["dataset"]:
            raise ArgumentError(
                f"state of data set {state['dataset'] or '(none)'}, but this is {self.digest or '(none)'}: its samples "
                "are not the same, or not in the same shards"
            )
        if self.seed != state["seed"]:
            raise ArgumentError(f"state of an order with seed {state['seed']}, but this one has {self.seed}")
        # What 0.2.0 saved does not say its order; a Mixture's, which was another then, has another data set's digest.
        if self.order != state.get("order", self.order):
            raise ArgumentError(
                f"state of order {state['order']}, but this one is {self.order}: another shuffle, window, number of "
                "samples or weights; want the order that the training began with"
            )
        if state["epoch"] < 0 or not 0 <= state["samples"] <= length:
            raise ArgumentError(f"state of epoch {state['epoch']}, {state['samples']} samples: want 0 to {length}")
        return replace(self, epoch=state["epoch"], samples=state["samples"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A step's samples on one rank."""

    epoch: int
    begin: int  # where in the epoch the global batch begins
    end: int  # and where it ends: what is done of the epoch once the step is
    share: Share
    places: Numbers  # of this rank's samples in the epoch, int64 (samples,)
    samples: Numbers  # and which they are


def steps(order: Order, batch: int, *, epoch: int = 0, begin: int = 0, rank: int = 0, ranks: int = 1) -> Iterator[Step]:
    """Yield an epoch's steps from `begin` on, as `rank` of `ranks` has them.

    Args:
        order: of the samples.
        batch: samples of a step, on all ranks together.
        epoch: which one.
        begin: samples of it that are done.
        rank: whose part.
        ranks: how many there are. Where a batch is shorter, the last of them have no sample in it.

    Raises:
        ArgumentError: a batch of nothing, or a rank that is not among `ranks`.
    """
    if batch < 1 or not 0 <= rank < ranks or begin < 0 or epoch < 0:
        raise ArgumentError(
            f"batch {batch}, rank {rank} of {ranks}, epoch {epoch} from {begin}: want 1 or more, a rank"
        )
    own = len(range(rank, batch, ranks))  # of a whole batch
    # Orders are cheap by the block: so many steps of this rank at a time.
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
