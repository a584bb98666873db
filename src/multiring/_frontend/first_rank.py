"""Work that rank 0 does for all ranks, and output and seeds of several ranks."""

import logging
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from multiring._arguments import require_flag, require_whole
from multiring._frontend.lifecycle import is_initialized, local_rank, rank, size
from multiring._frontend.object_collectives import allgather_object, broadcast_object
from multiring.errors import ArgumentError, MismatchError

Item = TypeVar("Item")


@contextmanager
def on_first_rank(*, each_host: bool = False) -> Iterator[bool]:
    """Run the block on rank 0 first, and on the other ranks after rank 0 has ended it.

    Use it to prepare files on rank 0 that the other ranks read. Every rank calls it. The context manager yields whether
    this rank is first.

    Args:
        each_host: True lets the first rank of each host go first, for example to prepare files on the host's own disk.

    Raises:
        MismatchError: on the other ranks: the block failed on a first rank. They do not run it.
    """
    is_first = local_rank() == 0 if each_host else rank() == 0
    if not is_first:
        _raise_if_failed(allgather_object("", name="on_first_rank"))
        yield False
        return
    try:
        yield True
    except Exception as error:
        allgather_object(f"{type(error).__name__}: {error}", name="on_first_rank")
        raise
    _raise_if_failed(allgather_object("", name="on_first_rank"))


def _raise_if_failed(told: list[str]) -> None:
    for number, text in enumerate(told):
        if text:
            raise MismatchError(f"on_first_rank: rank {number} failed with {text}")


def print_once(*values: object, **options: Any) -> None:
    """Print on rank 0 only; the arguments are those of `print`.

    Before `init`, every process prints.
    """
    if not is_initialized() or rank() == 0:
        print(*values, **options)  # noqa: T201 -- printing is its purpose


def progress(items: Iterable[Item], description: str = "", *, total: int | None = None) -> Iterable[Item]:
    """Return `items`, with a progress bar on rank 0.

    Without tqdm, or if stderr is not a terminal, there is no progress bar.
    """
    if (is_initialized() and rank()) or not sys.stderr.isatty():
        return items
    try:
        from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore] # noqa: PLC0415 -- an optional package
    except ImportError:
        return items
    bar: Iterable[Item] = tqdm(items, desc=description or None, total=total)
    return bar


class RankFilter(logging.Filter):
    """Adds the rank to each log record, and filters records by rank.

    Records of ranks other than 0 pass from level `others` on.
    `logging.Formatter("[rank %(rank)s of %(ranks)s] %(message)s")` shows the rank.
    """

    def __init__(self, others: int = logging.WARNING) -> None:
        super().__init__()
        self._others = others

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record passes, after setting its `rank` and `ranks`."""
        own, ranks = (rank(), size()) if is_initialized() else (0, 1)
        vars(record).update(rank=own, ranks=ranks)
        return own == 0 or record.levelno >= self._others


def log_by_rank(level: int = logging.INFO, *, others: int = logging.WARNING) -> None:
    """Log to stderr, with the rank in each line.

    Ranks other than 0 log from level `others` on.

    Raises:
        ArgumentError: a level is not a whole number from 0 on, such as logging.INFO.
    """
    level, others = require_whole("level", level), require_whole("others", others)
    handler = logging.StreamHandler()
    handler.addFilter(RankFilter(others))
    handler.setFormatter(logging.Formatter("[rank %(rank)s of %(ranks)s] %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=min(level, others), handlers=[handler], force=True)


def seed_everything(seed: int | None, seeds: Iterable[Callable[[int], object]] = (), *, differs: bool = False) -> int:
    """Seed the random number generators of Python, NumPy and the framework.

    Every rank calls it. The function returns the seed that this rank uses.

    Args:
        seed: 0 to 2^32 - 1, the same on all ranks. With None, rank 0 draws a seed for all ranks.
        seeds: functions that seed the framework's generators.
        differs: True gives each rank its own random numbers, for example for dropout or augmentation. False gives all
            ranks the same numbers, for example for a model's initial parameters.

    Raises:
        ArgumentError: `seed` is out of range, or no whole number.
        MismatchError: on every rank: the ranks passed different seeds. On the other ranks: one rank's seed is wrong.
    """
    try:
        differs = require_flag("differs", differs)
        if seed is not None:
            seed = require_whole("seed", seed, 0, (1 << 32) - 1, wanted=f"an integer of 0 to {(1 << 32) - 1}, or None")
    except ArgumentError as error:
        if size() > 1:  # the other ranks would wait for this one
            allgather_object(f"none: {error}", name="seed_everything")
        raise
    if size() > 1:
        told = allgather_object(seed, name="seed_everything")
        if len(set(told)) > 1:
            raise MismatchError(
                f"seed_everything: the ranks pass different seeds, by rank {told}; pass one seed, with differs=True if "
                "each rank should draw its own numbers"
            )
    common: int = (
        broadcast_object(random.SystemRandom().getrandbits(32), name="seed_everything") if seed is None else seed
    )
    own = int(np.random.SeedSequence([common, rank()]).generate_state(1)[0]) if differs else common
    random.seed(own)
    np.random.seed(own)  # noqa: NPY002 -- programs use the legacy generator
    for each in seeds:
        each(own)
    return own
