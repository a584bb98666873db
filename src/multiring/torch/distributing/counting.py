"""Counts of each rank's samples, for batches of sizes not known in advance."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from multiring._frontend.lifecycle import size
from multiring._runtime.group.handles import told_apart
from multiring.data import Share, shard_batch
from multiring.errors import ArgumentError, MismatchError
from multiring.torch.alone import LONE_RANK
from multiring.torch.collectives.allgather import allgather
from multiring.torch.distributing.fingerprints import UNKNOWN, fingerprint

_NOTHING_MORE = (0, 0, UNKNOWN)


class CountedBatch(NamedTuple):
    """A batch, and the number of samples in it that belong to this rank."""

    batch: Any
    samples: int  # samples in `batch` that belong to this rank
    total: int  # samples in the batch that this rank's part was taken from
    least: int  # samples of the rank with the fewest samples in it
    seen: int  # fingerprint of that larger batch, or UNKNOWN


class Counting:
    """Collate and count this rank's part of each batch of an iterable data set.

    The loader's worker processes run this collate function, so it is picklable and holds all its state.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], rank: int, ranks: int, *, looks: bool) -> None:
        """Collate only the samples of `rank` in each batch.

        Args:
            collate: the original loader's collate function.
            rank: this rank.
            ranks: number of ranks that share each batch; 1 if the whole batch belongs to this rank.
            looks: whether to take a fingerprint of each batch.
        """
        self._collate = collate
        self._rank = rank
        self._ranks = ranks
        self._looks = looks

    def __call__(self, samples: list[Any]) -> CountedBatch:
        """Collate this rank's part of `samples`.

        If the part is empty, the batch consists of the first sample, and its count is 0.
        """
        part = shard_batch(samples, self._rank, self._ranks)
        seen = fingerprint(samples) if self._looks else UNKNOWN
        return CountedBatch(
            self._collate(part or samples[:1]), len(part), len(samples), len(samples) // self._ranks, seen
        )


def divided(batches: Iterator[CountedBatch], *, agree: bool) -> Iterator[tuple[Any, Share]]:
    """Yield this rank's part of each batch; every rank reads the whole batch.

    Args:
        batches: this rank's counted batches.
        agree: whether to compare the batches with the other ranks' batches. With False, the caller guarantees that
            they are the same.

    Raises:
        MismatchError: the ranks' batches differ. Every rank raises it, during the iteration.
    """
    ranks = size()
    while True:
        counted = next(batches, None)
        if agree and ranks > 1:
            _require_same(_told(counted))
        if counted is None:
            return
        yield (
            counted.batch,
            Share(samples=counted.samples, total=counted.total, ranks=ranks, least=counted.least),
        )


def together(batches: Iterator[CountedBatch]) -> Iterator[tuple[Any, Share]]:
    """Yield this rank's batches until no rank has any left.

    The batches of all ranks together form the global batch. A rank that has run out of batches yields its last batch
    again, with a share of 0 samples.

    Raises:
        ArgumentError: a rank has no samples at all. Every rank raises it, in the first iteration.
    """
    ranks = size()
    last: CountedBatch | None = None
    for number in itertools.count():
        counted = next(batches, None)
        counts = [samples for samples, _, _ in _told(counted)]
        if not any(counts):
            return
        last = counted or last
        if last is None or (number == 0 and not all(counts)):
            raise ArgumentError(
                f"rank {counts.index(0)} has no samples, but other ranks have some: want at least one sample on each "
                "rank"
            )
        own = counted.samples if counted else 0
        yield last.batch, Share(samples=own, total=sum(counts), ranks=ranks, least=min(counts))


def require_distinct(batch: Any, share: Share) -> None:
    """Raise ArgumentError on every rank if two ranks have the same batch."""
    own = fingerprint(batch) if share.samples else UNKNOWN
    found: list[int] = allgather(torch.tensor([own], device="cpu"), name="distribute.first_batch").tolist()
    alike = [[str(rank) for rank, each in enumerate(found) if each == one] for one in set(found) - {UNKNOWN}]
    for ranks in sorted(alike):
        if len(ranks) > 1:
            raise ArgumentError(
                f"ranks {', '.join(ranks)} have the same first batch; want different samples on each rank. With "
                "sharded=True, each rank's loader must read its own samples. If samples are generated at each read, "
                "seed the generator differently on each rank. If the ranks are meant to have the same samples, "
                "pass check=False"
            )


def _told(counted: CountedBatch | None) -> list[tuple[int, int, int]]:
    """Exchange the counts and fingerprints of all ranks' batches, and return them by rank."""
    own = _NOTHING_MORE if counted is None else (counted.samples, counted.total, counted.seen)
    if size() == 1 and not LONE_RANK.exchanges:
        return [own]
    return [tuple(each) for each in allgather(torch.tensor([own], device="cpu"), name="distribute.counts").tolist()]


def _require_same(rows: list[tuple[int, int, int]]) -> None:
    read = {rank: f"{total} samples, {seen:016x}" if total else "no more" for rank, (_, total, seen) in enumerate(rows)}
    if len(set(read.values())) > 1:
        raise MismatchError(
            f"distribute: the ranks' iterable data sets give different batches: {told_apart(read)}. Each rank has to "
            "read all samples, in the same order. If the data set shuffles, seed it with the same number on all ranks. "
            "If it gives each rank different samples, pass sharded=True"
        )
