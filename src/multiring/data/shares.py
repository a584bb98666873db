"""Divide a global batch among the ranks, and weight each rank's part in an average.

Rank r of p gets samples r, r + p, r + 2p, ... of a batch, as in `elastic_order`. The parts differ by at most one
sample. If the batch is sorted, for instance by length, all parts have similar samples. Ranks of different speeds can
have parts of given sizes, which are spread over the batch in the same way.
"""

import hashlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from multiring._arguments import require_flag, require_seed, require_whole
from multiring.errors import ArgumentError

Sample = TypeVar("Sample")


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """A rank's part of a global batch, as numbers of samples.

    Raises:
        ArgumentError: the batch has no samples, or the numbers contradict each other.
    """

    samples: int  # samples of this rank
    total: int  # samples of all ranks together
    ranks: int  # number of ranks
    least: int  # samples of the rank with the fewest samples

    def __post_init__(self) -> None:
        for name in ("samples", "total", "ranks", "least"):
            require_whole(f"Share: {name}", getattr(self, name), 1 if name == "ranks" else 0)
        if self.total < 1:
            raise ArgumentError("a batch of 0 samples: want at least one")
        if self.least > self.samples or self.samples > self.total:
            raise ArgumentError(
                f"a share of {self.samples} of {self.total} samples, and of {self.least} on the rank with the fewest: "
                "want least <= samples <= total"
            )

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

    Raises:
        ArgumentError: `ranks` is not a whole number from 1 on, or `rank` is not in 0 ... `ranks` - 1.
    """
    ranks = require_whole("ranks", ranks, 1)
    rank = require_whole("rank", rank, 0, ranks - 1)
    return list(batch[rank::ranks])


def positions_by_counts(counts: Sequence[int], rank: int) -> NDArray[np.int64]:
    """Return the positions of a rank's samples in a batch, int64, in ascending order.

    Each rank's samples are spread evenly over the batch. If all counts are those of equal parts, the positions are
    rank, rank + ranks, ..., as in `shard_batch`.

    Args:
        counts: by rank, its number of samples; their sum is the number of samples of the batch.
        rank: the rank whose positions are returned.
    """
    # Sample j of a rank with n samples is in the middle of the n-th part j of the batch. Of samples in one place, that
    # of the lowest rank comes first.
    middles = np.concatenate([(np.arange(count) + 0.5) / count for count in counts if count] or [np.empty(0)])
    owners = np.repeat(np.arange(len(counts)), counts)
    found: NDArray[np.int64] = np.flatnonzero(owners[np.lexsort((owners, middles))] == rank).astype(np.int64)
    return found


def merge_batches(
    batches: Iterable[Iterable[Sample]], count: int, *, drops_last: bool = False
) -> Iterator[list[Sample]]:
    """Yield batches that each join `count` consecutive batches.

    Args:
        batches: the batches to join; the iterable may be infinite.
        count: 1 or more.
        drops_last: whether to discard the last batches if they are fewer than `count`.

    Raises:
        ArgumentError: `count` is not a whole number from 1 on.
    """
    # The checks come before the first batch is asked for, so this function is no generator itself.
    return _merged(iter(batches), require_whole("count", count, 1, sys.maxsize), require_flag("drops_last", drops_last))


def _merged(source: Iterator[Iterable[Sample]], count: int, drops_last: bool) -> Iterator[list[Sample]]:  # noqa: FBT001
    while group := list(islice(source, count)):
        if drops_last and len(group) < count:
            return
        yield [sample for batch in group for sample in batch]


def seed_for(seed: int, rank: int) -> int:
    """Return a seed for `rank`, 0 to 2^63 - 1, that differs between ranks.

    Raises:
        ArgumentError: `seed` is not a whole number, or `rank` is not one from 0 on.
    """
    seed, rank = require_seed("seed", seed), require_whole("rank", rank)
    digest = hashlib.blake2b(f"{seed} {rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
