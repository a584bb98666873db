"""What one rank does for all, and what of several ranks' output is worth seeing."""

import logging
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from multiring.errors import ArgumentError, MismatchError
from multiring.frontend.lifecycle import is_initialized, local_rank, rank, size
from multiring.frontend.object_collectives import allgather_object, broadcast_object

Item = TypeVar("Item")


@contextmanager
def on_first_rank(*, each_host: bool = False) -> Iterator[bool]:
    """Run the block on rank 0 first, and then, when it is done there, on the others: they find what it has prepared.

    Every rank calls it. The block is told whether this rank is (or was) the first.

    Args:
        each_host: whether the first rank of each host goes first, as for what lies on the host's own disk.

    Raises:
        MismatchError: on the others: it failed on a first rank; they do not run it.
    """
    is_first = local_rank() == 0 if each_host else rank() == 0
    if not is_first:
        _heed(allgather_object("", name="on_first_rank"))
        yield False
        return
    try:
        yield True
    except Exception as error:
        allgather_object(f"{type(error).__name__}: {error}", name="on_first_rank")
        raise
    _heed(allgather_object("", name="on_first_rank"))


def _heed(told: list[str]) -> None:
    for number, text in enumerate(told):
        if text:
            raise MismatchError(f"on_first_rank: rank {number} failed with {text}")


def print_once(*values: object, **options: Any) -> None:
    """As `print`, on rank 0 only; also before `init`, where every process is the first one it knows of."""
    if not is_initialized() or rank() == 0:
        print(*values, **options)  # noqa: T201 -- that is what it is for


def progress(items: Iterable[Item], description: str = "", *, total: int | None = None) -> Iterable[Item]:
    """Return `items`, with a progress bar on rank 0 where tqdm is installed and somebody looks; else as they are."""
    if (is_initialized() and rank()) or not sys.stderr.isatty():
        return items
    try:
        from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore] # noqa: PLC0415 -- not everybody's
    except ImportError:
        return items
    bar: Iterable[Item] = tqdm(items, desc=description or None, total=total)
    return bar


class RankFilter(logging.Filter):
    """Says of each record which rank it is of, and lets others' than rank 0's pass from `others` on.

    `logging.Formatter("[rank %(rank)s of %(ranks)s] %(message)s")` shows it.
    """

    def __init__(self, others: int = logging.WARNING) -> None:
        super().__init__()
        self._others = others

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is to be seen."""
        own, ranks = (rank(), size()) if is_initialized() else (0, 1)
        vars(record).update(rank=own, ranks=ranks)
        return own == 0 or record.levelno >= self._others


def log_by_rank(level: int = logging.INFO, *, others: int = logging.WARNING) -> None:
    """Have the program's log on stderr, each line with its rank; those of other ranks than 0 from level `others` on."""
    handler = logging.StreamHandler()
    handler.addFilter(RankFilter(others))
    handler.setFormatter(logging.Formatter("[rank %(rank)s of %(ranks)s] %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=min(level, others), handlers=[handler], force=True)


def seed_everything(seed: int | None, seeds: Iterable[Callable[[int], object]] = (), *, differs: bool = False) -> int:
    """Seed the generators of random numbers of Python, NumPy and the framework; return the seed. Every rank calls it.

    Args:
        seed: 0 to 2^32 - 1, the same on all ranks; None draws one, on rank 0.
        seeds: what seeds the framework's.
        differs: whether each rank gets numbers of its own, as for dropout or augmentation; else all get the same,
            as for what a model begins with.

    Raises:
        ArgumentError: it is out of range.
        MismatchError: on every rank: they want different seeds.
    """
    wanted: object = seed  # whatever a user gave
    if wanted is not None and not (isinstance(wanted, int) and 0 <= wanted < 1 << 32):
        raise ArgumentError(f"seed={seed!r}: want an integer of 0 to {(1 << 32) - 1}, or None")
    if size() > 1:
        told = allgather_object(seed, name="seed_everything")
        if len(set(told)) > 1:
            raise MismatchError(
                f"seed_everything: the ranks want different seeds, by rank {told}; want one, and differs=True where "
                "each rank is to draw its own numbers"
            )
    common: int = (
        broadcast_object(random.SystemRandom().getrandbits(32), name="seed_everything") if seed is None else seed
    )
    own = int(np.random.SeedSequence([common, rank()]).generate_state(1)[0]) if differs else common
    random.seed(own)
    np.random.seed(own)  # noqa: NPY002 -- programs use it
    for each in seeds:
        each(own)
    return own
