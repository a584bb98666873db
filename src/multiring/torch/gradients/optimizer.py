"""DistributedOptimizer: an optimizer whose gradients are those of all ranks."""

import warnings
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from multiring.errors import ArgumentError, UnsupportedError
from multiring.frontend.consistency_check import told_to_others
from multiring.frontend.process_sets import ProcessSet, global_process_set, members_of, no_process_set
from multiring.frontend.reduce_ops import Average, chosen_op, name_of
from multiring.gradients.buckets import BUCKET_BYTES
from multiring.gradients.options import Options
from multiring.runtime import is_initialized
from multiring.torch.compression import Compression, option_of
from multiring.torch.gradients.distributed import Distributed, share
from multiring.torch.gradients.setup import Setup, groups_from, named_from, placed, require_names, require_optimizer
from multiring.torch.parallelizing.held import refuse_held

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


def DistributedOptimizer(  # noqa: N802, PLR0913, PLR0917 -- Horovod's name and parameters
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int | str = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,  # noqa: FBT001, FBT002 -- Horovod's
    process_set: ProcessSet = global_process_set,
    *,
    error_feedback: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
) -> Optimizer:
    """Make `optimizer`'s gradients those of all ranks from the end of each backward on, and return it.

    Every rank of the process set calls it, with the same parameters. The optimizer stays the object it was, and of its
    class: schedulers and checkpoints made with it go on working. What a rank has no gradient for counts as zero; a
    `.grad` stays None where no rank has one. Called again, it makes the sharing anew, as parameters that begin to
    require a gradient need.

    Args:
        optimizer: any but LBFGS, which decides by the loss of one rank.
        named_parameters: as `model.named_parameters()` gives them, in the order in which the model uses them: names for
            errors, and the order for buckets. All of the optimizer's, and perhaps more.
        compression: Compression.fp16, .bf16 or .int8: what float32 gradients become between hosts (`Group.all_reduce`);
            those of other types travel as they are. PowerSGD(rank=...) sends float32 matrices as narrow factors, always
            with error feedback. Or a class with compress and decompress, through which each gradient goes.
        backward_passes_per_step: how many backwards add up before their sum is reduced; a step reduces in any case.
        op: Average; or Sum, where each rank's loss is divided by the number of samples of all ranks, so that ranks may
            have unlike numbers of them; or Adasum, where each rank steps with its own gradients, and the changes of the
            parameters are combined instead.
        gradient_predivide_factor: for Average: divide by it before the sum, and by the rest of the ranks' number after.
        num_groups: Horovod's older name of `groups`, for a number.
        groups: lists of parameters whose gradients are reduced together, or how many such lists to make; by default
            buckets of `bucket_bytes`.
        sparse_as_dense: whether sparse gradients travel as dense ones, and become sparse again afterwards; otherwise
            their rows are gathered.
        process_set: the ranks to share with; other ranks may call this as well, and train for themselves.
        error_feedback: whether what this rank's gradients lose by `compression` goes along with the next ones.
        bucket_bytes: how much is reduced at once.

    Raises:
        ArgumentError: an option makes no sense, alone or with these parameters; a parameter has no name, another's, or
            a type that cannot be moved.
        MismatchError: on every rank: their parameters or options differ.
        UnsupportedError: a parameter on a GPU, or an optimizer that cannot be distributed.
        StateError: before `init`.
    """
    if num_groups != 0:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    with _told_to_others(process_set):
        require_optimizer(optimizer)
        refuse_held(
            "DistributedOptimizer",
            [parameter for _, parameter in placed(optimizer)],
            "its step() shares gradients; want the optimizer as it is",
        )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UnsupportedError(
                "LBFGS decides by the loss, which each rank has its own of; want another optimizer, such as Adam"
            )
        options = Options(
            op=name_of(chosen_op(op)),
            bucket_bytes=bucket_bytes,
            backward_passes_per_step=backward_passes_per_step,
            compression=option_of(compression),
            error_feedback=error_feedback,
            predivide=gradient_predivide_factor,
            sparse_as_dense=sparse_as_dense,
        )
        named = None if named_parameters is None else named_from(named_parameters)
        if named is not None:
            require_names(optimizer, named)
        setup = Setup(options, named, groups_from(groups), process_set)
    share(optimizer, setup)
    return optimizer


def gradient_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return how many bytes each reduction of `optimizer`'s gradients hands over, as they travel between hosts.

    That is after coding and compression; how often an algorithm sends them is in docs/algorithms.md. 0 for one rank.

    Raises:
        ArgumentError: `optimizer` is no DistributedOptimizer.
    """
    if not isinstance(optimizer, Distributed):
        raise ArgumentError(f"{type(optimizer).__name__} shares no gradients; want one from DistributedOptimizer")
    return optimizer.sent_bytes()


def share_anew(optimizer: torch.optim.Optimizer) -> None:
    """Share the gradients of a DistributedOptimizer in the job that this process is in now; others stay as they are.

    For a job that was left and joined anew; every rank of it has to call this. Gradients of a step that failed are
    undefined, and are dropped.
    """
    if isinstance(optimizer, Distributed):
        optimizer.share_anew()
        optimizer.zero_grad()


def _told_to_others(process_set: ProcessSet) -> Any:
    """Tell the other ranks of an error within, where there are any: names may be checked before `init`."""
    if not isinstance(process_set, ProcessSet):
        raise no_process_set(process_set)
    if not is_initialized() or not process_set.included():
        return nullcontext()
    return told_to_others(members_of(process_set).group, "DistributedOptimizer")
