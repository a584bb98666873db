"""A global batch, divided among the ranks: who gets which of its samples, and what each rank's part counts for.

Rank r of p gets samples r, r + p, r + 2p, ... of a batch, as it does of an epoch (`elastic_order`): parts differ by one
sample at most, and a batch that was sorted, say by length, gives like parts.
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
    """A rank's part of a global batch; in numbers of samples.

    Raises:
        ArgumentError: the batch has no samples.
    """

    samples: int  # this rank's
    total: int  # all ranks'
    ranks: int
    least: int  # those of the rank that has fewest

    def __post_init__(self) -> None:
        if self.total < 1:
            raise ArgumentError("a batch of 0 samples: want at least one")

    @property
    def weight(self) -> float:
        """What the mean over this rank's samples counts for in the average of all ranks' means.

        That average is then the mean over all samples. 1.0 where every rank has equally many.
        """
        return self.samples * self.ranks / self.total


def part_of(batch: Sequence[Sample], rank: int, ranks: int) -> list[Sample]:
    """Return `rank`'s samples of `batch`; none where it has fewer than there are ranks before this one, and it."""
    return list(batch[rank::ranks])


def joined(batches: Iterable[Iterable[Sample]], count: int, *, drops_last: bool = False) -> Iterator[list[Sample]]:
    """Yield each `count` batches as one.

    Args:
        batches: as many as there are; perhaps for ever.
        count: 1 or more.
        drops_last: whether the last ones are left out where they are fewer than `count`.
    """
    source = iter(batches)
    while group := list(islice(source, count)):
        if drops_last and len(group) < count:
            return
        yield [sample for batch in group for sample in batch]


def seed_for(seed: int, rank: int) -> int:
    """Return a seed for `rank` that depends on both, and of which no two ranks have the same; 0 to 2^63 - 1."""
    digest = hashlib.blake2b(f"{seed} {rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
