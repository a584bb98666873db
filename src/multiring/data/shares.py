"""Divide a global batch among the ranks, and weight each rank's part in an average.

Rank r of p gets samples r, r + p, r + 2p, ... of a batch, as in `elastic_order`. The parts differ by at most one
sample. If the batch is sorted, for instance by length, all parts have similar samples.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from multiring.errors import ArgumentError

Sample = TypeVar("Sample")


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """A rank's part of a global batch, as numbers of samples.

    Raises:
        ArgumentError: the batch has no samples.
    """

    samples: int  # samples of this rank
    total: int  # samples of all ranks together
    ranks: int  # number of ranks
    least: int  # samples of the rank with the fewest samples

    def __post_init__(self) -> None:
        if self.total < 1:
            raise ArgumentError("a batch of 0 samples: want at least one")

    @property
    def weight(self) -> float:
        """The factor for this rank's mean before the ranks' means are averaged.

        The average of the weighted means is then the mean over all samples. The factor is 1.0 if all ranks have the
        same number of samples.
        """
        return self.samples * self.ranks / self.total


def shard_batch(batch: Sequence[Sample], rank: int, ranks: int) -> list[Sample]:
    """Return the samples of `batch` that belong to `rank`.

    The result is empty if the batch has fewer than `rank + 1` samples.
    """
    return list(batch[rank::ranks])


def merge_batches(
    batches: Iterable[Iterable[Sample]], count: int, *, drops_last: bool = False
) -> Iterator[list[Sample]]:
    """Yield batches that each join `count` consecutive batches.

    Args:
        batches: the batches to join; the iterable may be infinite.
        count: 1 or more.
        drops_last: whether to discard the last batches if they are fewer than `count`.
    """
    source = iter(batches)
    while group := list(islice(source, count)):
        if drops_last and len(group) < count:
            return
        yield [sample for batch in group for sample in batch]


def seed_for(seed: int, rank: int) -> int:
    """Return a seed for `rank`, 0 to 2^63 - 1, that differs between ranks."""
    digest = hashlib.blake2b(f"{seed} {rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
