"""A check that a parallel model's ranks get the right samples in the first batch.

If a program's loaders give different samples to the ranks of a tensor or pipeline axis, training fails silently.
Therefore the ranks compare their first batch.
"""

import warnings
from typing import Any

import torch
import torch.distributed as dist

from multiring._settings import Settings
from multiring.errors import MismatchError
from multiring.torch.distributing.fingerprints import UNKNOWN, fingerprint

_SETTING = "MULTIRING_CHECK_FIRST_STEPS=0 turns this check off"
_NAMES = ("inputs", "targets")


def compare_first_batch(batch: tuple[Any, Any], data_rank: int, data_ranks: int, parallelism: str) -> None:
    """Compare the ranks' first batches. Every rank calls it.

    It warns if all parts of the batch are equal.

    Args:
        batch: this rank's inputs and targets.
        data_rank: number of the part of the global batch that they are.
        data_ranks: number of parts.
        parallelism: the axes and their sizes, as text.

    Raises:
        MismatchError: two ranks with the same `data_rank` have different samples. Every rank raises it.
    """
    own = torch.tensor([data_rank, *map(fingerprint, batch), Settings.from_environment().check_first_steps])
    told = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(told, own)
    rows: list[list[int]] = [each.tolist() for each in told]
    if not all(row[-1] for row in rows):
        return
    for column, name in enumerate(_NAMES, start=1):
        first: dict[int, tuple[int, int]] = {}  # by part: the first rank that has the part, and its fingerprint
        for rank, row in enumerate(rows):
            other, known = first.setdefault(row[0], (rank, row[column])) if row[column] != UNKNOWN else (rank, UNKNOWN)
            if known not in {UNKNOWN, row[column]}:
                raise MismatchError(
                    f"step: under {parallelism} ranks {other} and {rank} compute with the same samples, part {row[0]} "
                    f"of {data_ranks}, and their {name} differ: give all ranks one batch and cut it by share(), or "
                    f"have their loaders read by data_rank and data_ranks, in one order on all ranks. {_SETTING}"
                )
    if data_ranks > 1 and len({tuple(row[1:3]) for row in rows}) == 1 and UNKNOWN not in rows[0][1:3]:
        warnings.warn(
            f"step: under {parallelism} all {data_ranks} parts of the first batch are equal: if each rank has the "
            f"whole batch, cut it by share(); otherwise the ranks compute the same {data_ranks} times. {_SETTING}",
            stacklevel=4,
        )
