"""DistributedOptimizer: an optimizer that steps with the combined gradients of all ranks."""

import warnings
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from multiring._frontend.consistency_check import reporting_errors
from multiring._frontend.process_sets import ProcessSet, global_process_set, members_of, no_process_set
from multiring._frontend.reduce_ops import Average, chosen_op, name_of
from multiring._gradients.buckets import BUCKET_BYTES
from multiring._gradients.options import GradientOptions
from multiring._runtime import is_initialized
from multiring.errors import ArgumentError, UnsupportedError
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
    """Make `optimizer` step with the combined gradients of all ranks, and return it.

    Each backward then ends with the combined gradients in `.grad`. Every rank of the process set must call this
    function with the same parameters. The optimizer remains the same object and an instance of its class, so
    schedulers and checkpoints made with it keep working. A gradient that this rank does not have counts as zero. If no
    rank has a parameter's gradient, its `.grad` stays None. Call the function again if more parameters require a
    gradient later.

    Args:
        optimizer: any optimizer but LBFGS, whose steps depend on the loss of one rank.
        named_parameters: the result of `model.named_parameters()`, in the order in which the model uses the
            parameters. The names appear in errors, and the order determines the buckets. It must include all
            parameters of the optimizer, and may include more.
        compression: a member of Compression, such as Compression.bf16: the type of float32 gradients between hosts
            (`Group.all_reduce`); gradients of other types travel unchanged. PowerSGD(rank=...) sends float32 matrices
            as narrow factors, always with error feedback. A class with `compress` and `decompress` is applied to each
            gradient.
        backward_passes_per_step: the number of backwards whose sum is reduced at once. A step always reduces.
        op: Average, Sum or Adasum. For Sum, divide each rank's loss by the number of samples of all ranks; the ranks
            may then have different numbers of samples. With Adasum, each rank steps with its own gradients, and the
            ranks combine the changes of the parameters.
        gradient_predivide_factor: for Average: gradients are divided by this factor before the sum, and by the number
            of ranks over this factor after it.
        num_groups: Horovod's older name of `groups`, for a number.
        groups: lists of parameters whose gradients are reduced together, or the number of such lists to make; by
            default, buckets of `bucket_bytes` are made.
        sparse_as_dense: whether sparse gradients travel as dense tensors and become sparse again afterwards; otherwise
            their rows are gathered.
        process_set: the ranks that share gradients. Other ranks may call this function too; they train on their own.
        error_feedback: whether this rank adds its compression error to the next gradients.
        bucket_bytes: the size limit of a bucket, the unit that is reduced at once.

    Raises:
        ArgumentError: an option is invalid, alone or with these parameters; a parameter has no name, the name of
            another parameter, or a type that multiring cannot reduce.
        MismatchError: the ranks' parameters or options differ. Every rank raises it.
        UnsupportedError: a parameter is neither in host memory nor on a CUDA device, or the optimizer cannot be
            distributed.
        StateError: `init` was not called.
    """
    if num_groups != 0:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    with _reporting_errors(process_set):
        require_optimizer(optimizer)
        refuse_held(
            "DistributedOptimizer",
            [parameter for _, parameter in placed(optimizer)],
            "its step() reduces gradients; use the optimizer without DistributedOptimizer",
        )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UnsupportedError(
                "LBFGS decides by the loss, which differs between ranks; want another optimizer, such as Adam"
            )
        options = GradientOptions(
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
    """Return the bytes that one reduction of the gradients passes to collectives.

    The bytes are counted after compression, as they travel between hosts; docs/algorithms.md says how often an
    algorithm sends them. The result is 0 for one rank.

    Raises:
        ArgumentError: `optimizer` is not a DistributedOptimizer.
    """
    if not isinstance(optimizer, Distributed):
        raise ArgumentError(
            f"{type(optimizer).__name__} does not reduce gradients; want an optimizer from DistributedOptimizer"
        )
    return optimizer.sent_bytes()


def share_anew(optimizer: torch.optim.Optimizer) -> None:
    """Share a DistributedOptimizer's gradients in this process's current job; other optimizers are left unchanged.

    Call this after the process has left a job and joined a new one; every rank of the new job must call it. The
    gradients are dropped, because they are undefined after a failed step.
    """
    if isinstance(optimizer, Distributed):
        optimizer.share_anew()
        optimizer.zero_grad()


def _reporting_errors(process_set: ProcessSet) -> Any:
    """Return a context that reports an error within it to the other ranks; before `init`, it does nothing."""
    if not isinstance(process_set, ProcessSet):
        raise no_process_set(process_set)
    if not is_initialized() or not process_set.included():
        return nullcontext()
    return reporting_errors(members_of(process_set).group, "DistributedOptimizer")
