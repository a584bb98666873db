"""The first batch of a parallel model: have the ranks the samples that they are meant to have?

Nobody tells a program whose loaders give the ranks of a tensor or pipeline axis unlike samples: it trains, and to no
end. So the ranks compare their first batch.
"""

import warnings
from typing import Any

import torch
import torch.distributed as dist

from multiring.errors import MismatchError
from multiring.settings import Settings
from multiring.torch.distributing.fingerprints import UNKNOWN, fingerprint

_SETTING = "MULTIRING_CHECK_FIRST_STEPS=0 turns this check off"
_NAMES = ("inputs", "targets")


def compare_first_batch(batch: tuple[Any, Any], data_rank: int, data_ranks: int, parallelism: str) -> None:
    """Compare the first batch with those of the other ranks, which all call it.

    Args:
        batch: inputs and targets, of this rank.
        data_rank: the part of the batch that they are.
        data_ranks: how many parts there are.
        parallelism: the axes and their sizes, as text.

    Raises:
        MismatchError: on every rank: two ranks of one `data_rank` have unlike samples.
    """
    own = torch.tensor([data_rank, *map(fingerprint, batch), Settings.from_environment().check_first_steps])
    told = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(told, own)
    rows: list[list[int]] = [each.tolist() for each in told]
    if not all(row[-1] for row in rows):
        return
    for column, name in enumerate(_NAMES, start=1):
        first: dict[int, tuple[int, int]] = {}  # by the part: a rank, and what it has
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
            f"step: under {parallelism} all {data_ranks} parts of the first batch are equal: where the ranks have the "
            f"whole batch each, cut it by share(), or the same is computed {data_ranks} times. {_SETTING}",
            stacklevel=4,
        )
