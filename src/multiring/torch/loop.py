"""What a training script needs around its gradients: metrics, outputs, seeds."""

from typing import Any

import torch
from torch import Tensor

from multiring.frontend import evaluation, first_rank
from multiring.frontend.process_sets import ProcessSet, global_process_set
from multiring.torch.collectives.allgather import allgather


def gather(outputs: Any, process_set: ProcessSet = global_process_set) -> Any:
    """Return all ranks' outputs, by rank: of tensors the rows, of lists the elements; in dicts and tuples each.

    Every rank calls it, also one that had no samples, with tensors of no rows; so that evaluation is exact where the
    last batches are uneven. Dicts go by their names, in whatever order a rank has them. No gradient comes back.

    Raises:
        ArgumentError: something is neither.
        HorovodInternalError: on every rank: outputs differ in names or kinds, tensors differ in more than their rows,
            or a rank is gone.
    """

    def rows(tensor: Tensor) -> Tensor:
        return allgather(tensor.detach(), process_set=process_set)

    return evaluation.gathered(outputs, _is_tensor, rows, process_set)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def seed_everything(seed: int | None = 0, *, differs: bool = False) -> int:
    """Seed the generators of Python, NumPy and torch; return this rank's seed. Every rank calls it.

    Args:
        seed: 0 to 2^32 - 1, the same on all ranks; None draws one.
        differs: whether each rank gets numbers of its own, as for dropout or augmentation.

    Raises:
        ArgumentError: it is out of range.
        MismatchError: on every rank: they want different seeds.
    """
    return first_rank.seed_everything(seed, [torch.manual_seed], differs=differs)
