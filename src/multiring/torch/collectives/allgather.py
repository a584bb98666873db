"""allgather: every rank receives the rows of all ranks. The signatures are Horovod's."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from multiring._frontend.handles import PartsOfGroup, Several, Submitted, handle_of, parts_of
from multiring._frontend.process_sets import ProcessSet, global_process_set, members_of
from multiring._frontend.reduce_ops import Average
from multiring._frontend.signatures import ALLGATHER
from multiring.torch.collectives.allreduce import allreduce
from multiring.torch.collectives.varying_rows import submit_rows
from multiring.torch.interop import require_plain, wants_gradient


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Return the tensors of all ranks, concatenated along the first dimension.

    The result is in rank order. The operation is differentiable. The gradient of a rank's rows is the average of all
    ranks' gradients for these rows. Every rank must therefore run the backward pass.

    Args:
        tensor: a tensor of any type; the ranks' shapes may differ in the first dimension only.
        name: as for `allreduce`.
        process_set: the ranks that take part; by default all ranks.

    Raises:
        ArgumentError: this rank is not in the set, or another operation in progress has this name.
        CollectiveError: the ranks' calls differ, a tensor has no dimension, or a rank has failed. Every rank
            raises it.
        UnsupportedError: the tensor is not dense, or neither in host memory nor on a CUDA device.
    """
    require_plain(tensor)
    found: Tensor
    if wants_gradient(tensor):
        found = _Allgather.apply(tensor, name, process_set)  # type: ignore[no-untyped-call] # torch's own
    else:
        found, _ = submit_rows(members_of(process_set), tensor, name, waits=True).wait()
    return found


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start an `allgather` without a gradient, and return its handle.

    Pass the handle to `synchronize` or `poll`.
    """
    require_plain(tensor)
    return handle_of(_first(submit_rows(members_of(process_set), tensor, name)))


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[Tensor, ...]:
    """Return the `allgather` of each tensor.

    Every rank must pass the same number of tensors.
    """
    found: tuple[Tensor, ...]
    if wants_gradient(*tensors):
        found = _GroupedAllgather.apply(name, process_set, *tensors)  # type: ignore[no-untyped-call] # torch's own
    else:
        found = tuple(gathered for gathered, _ in _submit_group(tensors, name, process_set).wait())
    return found


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a `grouped_allgather` without a gradient, and return its handle."""
    return handle_of(_submit_group(tensors, name, process_set, tensors_only=True))


def _submit_group(
    tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet, *, tensors_only: bool = False
) -> Several:
    members = members_of(process_set)
    for tensor in tensors:
        require_plain(tensor)
    parts = parts_of(members, name, len(tensors))
    started = [
        submit_rows(members, tensor, part, more=more) for tensor, (part, more) in zip(tensors, parts, strict=True)
    ]

    def finish(found: list[tuple[Tensor, Sequence[int]]]) -> tuple[Any, ...]:
        return tuple(gathered for gathered, _ in found) if tensors_only else tuple(found)

    return Several(started, finish, PartsOfGroup(members, parts[0][0], ALLGATHER, len(tensors)))


def _first(pending: Submitted) -> Several:
    return Several([pending], lambda found: found[0][0])


def _own_rows(gradient: Tensor, place: tuple[int, int], process_set: ProcessSet) -> Tensor:
    return allreduce(gradient, op=Average, process_set=process_set).narrow(0, *place)


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None, process_set: ProcessSet) -> Tensor:
        members = members_of(process_set)
        found, rows = submit_rows(members, tensor, name, waits=True).wait()
        ctx.place, ctx.process_set = (sum(rows[: members.rank]), rows[members.rank]), process_set
        gathered: Tensor = found
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _own_rows(gradients[0], ctx.place, ctx.process_set), None, None


class _GroupedAllgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Tensor) -> tuple[Tensor, ...]:
        own = members_of(process_set).rank
        found = _submit_group(tensors, name, process_set).wait()
        ctx.places = [(sum(rows[:own]), rows[own]) for _, rows in found]
        ctx.process_set = process_set
        return tuple(gathered for gathered, _ in found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(gradients, ctx.places, strict=True)
        return None, None, *(_own_rows(gradient, place, ctx.process_set) for gradient, place in pairs)
