"""Helpers for a training script: gather outputs of all ranks, and seed random generators."""

from typing import Any

import torch
from torch import Tensor

from multiring._frontend import evaluation, first_rank
from multiring._frontend.process_sets import ProcessSet, global_process_set
from multiring.torch.collectives.allgather import allgather


def gather(outputs: Any, process_set: ProcessSet = global_process_set) -> Any:
    """Return the outputs of all ranks in rank order.

    The rows of tensors and the elements of lists are concatenated. The values of dicts and tuples are gathered one by
    one; values of dicts are matched by key. Every rank must call this function. A rank without samples passes tensors
    without rows, so that evaluation is exact even if the last batches differ in size. The result has no gradient.

    Raises:
        ArgumentError: an output is not a tensor, list, dict or tuple.
        CollectiveError: outputs differ in keys or kinds, tensors differ in more than the number of their rows, or
            a rank has failed. Every rank raises it.
    """

    def rows(tensor: Tensor) -> Tensor:
        return allgather(tensor.detach(), process_set=process_set)

    return evaluation.gathered(outputs, _is_tensor, rows, process_set)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def seed_everything(seed: int | None = 0, *, differs: bool = False) -> int:
    """Seed the generators of Python, NumPy and torch, and return this rank's seed.

    Every rank must call this function.

    Args:
        seed: 0 to 2^32 - 1, the same on all ranks; with None, a seed is drawn.
        differs: whether each rank gets different random numbers, as for dropout or augmentation.

    Raises:
        ArgumentError: `seed` is out of range.
        MismatchError: the ranks pass different seeds. Every rank raises it.
    """
    return first_rank.seed_everything(seed, [torch.manual_seed], differs=differs)
