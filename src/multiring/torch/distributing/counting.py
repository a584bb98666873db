"""How many samples each rank's batch has, where nobody can know beforehand: the ranks tell each other, step by step."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from multiring.data import Share, part_of
from multiring.errors import ArgumentError, MismatchError
from multiring.frontend.lifecycle import size
from multiring.runtime.group.handles import told_apart
from multiring.torch.collectives.allgather import allgather
from multiring.torch.distributing.fingerprints import UNKNOWN, fingerprint

_NOTHING_MORE = (0, 0, UNKNOWN)


class Counted(NamedTuple):
    """A batch, and what this rank knows of its part in the global one."""

    batch: Any
    samples: int  # this rank's, in `batch`
    total: int  # of the batch that they were taken from
    seen: int  # that batch's fingerprint, or UNKNOWN


class Counting:
    """A collate function that takes this rank's part of what an iterable data set gave, and counts.

    It works in the loader's workers, which may be started anew: so it holds what it needs, and can be pickled.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], rank: int, ranks: int, *, looks: bool) -> None:
        """Collate `rank`'s samples of each batch.

        Args:
            collate: the loader's own.
            rank: this one.
            ranks: among how many the batch is divided; 1 where it is this rank's as a whole.
            looks: whether fingerprints are taken.
        """
        self._collate = collate
        self._rank = rank
        self._ranks = ranks
        self._looks = looks

    def __call__(self, samples: list[Any]) -> Counted:
        """Return the batch made of this rank's part; where it has none, of another's sample."""
        part = part_of(samples, self._rank, self._ranks)
        seen = fingerprint(samples) if self._looks else UNKNOWN
        return Counted(self._collate(part or samples[:1]), len(part), len(samples), seen)


def divided(batches: Iterator[Counted], *, agree: bool) -> Iterator[tuple[Any, Share]]:
    """Yield this rank's parts of batches that every rank has as a whole.

    Args:
        batches: counted.
        agree: whether to ask the other ranks if theirs are the same; else they are known to be.

    Raises:
        MismatchError: from an iteration, on every rank: they are not.
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
            Share(samples=counted.samples, total=counted.total, ranks=ranks, least=counted.total // ranks),
        )


def together(batches: Iterator[Counted]) -> Iterator[tuple[Any, Share]]:
    """Yield this rank's batches, each a part of the global one that all ranks' batches are; until no rank has any.

    A rank that has no more gets its last one again, as a share of no samples.

    Raises:
        ArgumentError: from the first iteration, on every rank: one has no samples at all.
    """
    ranks = size()
    last: Counted | None = None
    for number in itertools.count():
        counted = next(batches, None)
        counts = [samples for samples, _, _ in _told(counted)]
        if not any(counts):
            return
        last = counted or last
        if last is None or (number == 0 and not all(counts)):
            raise ArgumentError(
                f"rank {counts.index(0)} has no samples, and others have: want at least one on each, to compute on"
            )
        own = counted.samples if counted else 0
        yield last.batch, Share(samples=own, total=sum(counts), ranks=ranks, least=min(counts))


def require_distinct(batch: Any, share: Share) -> None:
    """Raise ArgumentError, on every rank, where two of them have the same samples in their batches."""
    own = fingerprint(batch) if share.samples else UNKNOWN
    found: list[int] = allgather(torch.tensor([own]), name="distribute.first_batch").tolist()
    alike = [[str(rank) for rank, each in enumerate(found) if each == one] for one in set(found) - {UNKNOWN}]
    for ranks in sorted(alike):
        if len(ranks) > 1:
            raise ArgumentError(
                f"ranks {', '.join(ranks)} have the same first batch, where each is to have its own samples. With "
                "sharded=True each rank's loader has to give other samples than the others'; and samples that are made "
                "up as they are asked for need other random numbers on each rank. Where they are meant to be the same, "
                "pass check=False"
            )


def _told(counted: Counted | None) -> list[tuple[int, int, int]]:
    """Return what the ranks know of their batches, by rank."""
    own = _NOTHING_MORE if counted is None else (counted.samples, counted.total, counted.seen)
    if size() == 1:
        return [own]
    return [tuple(each) for each in allgather(torch.tensor([own]), name="distribute.counts").tolist()]


def _require_same(rows: list[tuple[int, int, int]]) -> None:
    read = {rank: f"{total} samples, {seen:016x}" if total else "no more" for rank, (_, total, seen) in enumerate(rows)}
    if len(set(read.values())) > 1:
        raise MismatchError(
            f"distribute: the ranks' iterable data sets give different batches: {told_apart(read)}. Each rank has to "
            "read all samples, in the same order: where the data set shuffles, by a seed of its own; where it gives "
            "each rank samples of its own, want sharded=True"
        )
