"""reducescatter: combine the ranks' tensors, and give each rank a part of the rows. The signatures are Horovod's."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from multiring._frontend.errors import RefusedInternalError
from multiring._frontend.handles import Name, PartsOfGroup, Several, Submitted, handle_of, parts_of, submit
from multiring._frontend.process_sets import Members, ProcessSet, global_process_set, members_of
from multiring._frontend.reduce_ops import LINEAR, Average, Combination, Sum, combination, name_of
from multiring._frontend.signatures import REDUCESCATTER, REDUCTION, SCALES, plain_signature
from multiring._gradients.options import require_compressor
from multiring._runtime import Group, Handle
from multiring.errors import Signature
from multiring.torch.collectives.allgather import allgather
from multiring.torch.collectives.allreduce import require_combinable
from multiring.torch.collectives.dtype_conversion import conversion_of, converted, converted_back, scaled
from multiring.torch.collectives.staged import Staged, Staging, to_device
from multiring.torch.collectives.varying_rows import submit_refusal
from multiring.torch.compression import Compression, compressor_of
from multiring.torch.interop import (
    buffer_from,
    dtype_name,
    dtype_of,
    in_one_piece,
    require_plain,
    tensor_of,
    wants_gradient,
)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Combine the tensors of all ranks, and return this rank's part of the rows.

    Rank r of n receives `rows // n` rows, and one row more if `r < rows % n`. The operation is differentiable: every
    rank must run the backward pass.

    Args:
        tensor: a tensor of the same shape and type on all ranks, with at least one dimension.
        name: as for `allreduce`.
        compression: the form in which the tensor travels, a member of `Compression`, its name, or the
            program's own compressor.
        op: Average or Sum, or their names.
        process_set: the ranks that take part; by default all ranks.
        prescale_factor: as for `allreduce`.
        postscale_factor: as for `allreduce`.

    Raises:
        ArgumentError: the type does not support `op`, this rank is not in the set, or another operation in progress
            has this name.
        CollectiveError: `op` is neither Average nor Sum, the ranks' calls differ, a tensor has no dimension, or
            a rank has failed. Every rank raises it.
        UnsupportedError: the tensor is not dense, or neither in host memory nor on a CUDA device.
    """
    compression = compressor_of(compression)
    require_compressor(compression)
    compressed, context = compression.compress(tensor)
    require_plain(compressed)
    how = combination(op, None, prescale_factor, postscale_factor)
    found: Tensor
    if wants_gradient(compressed):
        found = _Reducescatter.apply(compressed, name, how, process_set)  # type: ignore[no-untyped-call] # torch's own
    else:
        found = _submit(members_of(process_set), compressed, name, how).wait()
    decompressed: Tensor = compression.decompress(found, context)
    return decompressed


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int | str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a `reducescatter` without a gradient, and return its handle.

    Pass the handle to `synchronize` or `poll`.
    """
    how = combination(op, None, prescale_factor, postscale_factor)
    return handle_of(_submit(members_of(process_set), tensor, name, how))


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Return the `reducescatter` of each tensor.

    Every rank must pass the same number of tensors.
    """
    compression = compressor_of(compression)
    require_compressor(compression)
    pairs = [compression.compress(tensor) for tensor in tensors]
    compressed = [tensor for tensor, _ in pairs]
    how = combination(op, None, prescale_factor, postscale_factor)
    if wants_gradient(*compressed):
        found = _GroupedReducescatter.apply(name, how, process_set, *compressed)  # type: ignore[no-untyped-call]
    else:
        found = _submit_group(compressed, name, how, process_set).wait()
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(found, pairs, strict=True)]


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int | str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a `grouped_reducescatter` without a gradient, and return its handle."""
    how = combination(op, None, prescale_factor, postscale_factor)
    return handle_of(_submit_group(tensors, name, how, process_set))


def _submit_group(tensors: Sequence[Tensor], name: str | None, how: Combination, process_set: ProcessSet) -> Several:
    members = members_of(process_set)
    for tensor in tensors:
        require_plain(tensor)
        conversion_of(tensor.dtype, how.op, how.postscale, members.size)
    parts = parts_of(members, name, len(tensors))
    started = [_submit(members, tensor, part, how, more) for tensor, (part, more) in zip(tensors, parts, strict=True)]
    return Several(started, tuple, PartsOfGroup(members, parts[0][0], REDUCESCATTER, len(tensors)))


def _submit(members: Members, tensor: Tensor, name: Name, how: Combination, more: Signature = ()) -> Submitted:
    require_plain(tensor)
    if how.op not in LINEAR:
        raise RefusedInternalError(f"reducescatter by {name_of(how.op)}: want Average or Sum; allreduce has the others")
    if not tensor.dim():
        return submit_refusal(members, tensor, name, REDUCESCATTER)
    if not tensor.is_cpu:
        return _submit_staged(members, tensor, name, how, more)
    dtype = tensor.dtype
    conversion = conversion_of(dtype, how.op, how.postscale, members.size)
    more = ((REDUCTION, name_of(how.op)), (SCALES, str((how.prescale, how.postscale))), *more)
    memory = in_one_piece(converted(tensor.detach(), conversion, how.prescale))

    def start(group: Group, label: str) -> Handle:
        return group.reduce_scatter_async(buffer_from(memory), op=conversion.op, label=label)

    def finish(found: Any) -> Tensor:
        return converted_back(tensor_of(found, dtype_of(conversion.dtype)), conversion, dtype)

    return submit(members, name, plain_signature(REDUCESCATTER, dtype_name(dtype), tensor.shape, more), start, finish)


def _submit_staged(members: Members, tensor: Tensor, name: Name, how: Combination, more: Signature) -> Staged:
    require_combinable(tensor.dtype, how, members.size)
    staging = Staging(members, REDUCESCATTER, name, [tensor])
    with staging.preparing([tensor]):
        host = staging.copied(tensor)

    device = tensor.device

    def finish(found: Tensor) -> Tensor:
        return to_device(members, found, device)

    return staging.submit(lambda placed: _submit(members, host, placed, how, more), finish)


def _spread(gradient: Tensor, how: Combination, process_set: ProcessSet) -> Tensor:
    """Return the input's gradient, given the gradient of this rank's rows of the result."""
    ranks = members_of(process_set).size if how.op == Sum else 1
    return scaled(allgather(gradient, process_set=process_set), ranks * how.prescale * how.postscale)


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None, how: Combination, process_set: ProcessSet) -> Tensor:
        ctx.how, ctx.process_set = how, process_set
        found: Tensor = _submit(members_of(process_set), tensor, name, how).wait()
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _spread(gradients[0], ctx.how, ctx.process_set), None, None, None


class _GroupedReducescatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, how: Combination, process_set: ProcessSet, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.how, ctx.process_set = how, process_set
        found: tuple[Tensor, ...] = _submit_group(tensors, name, how, process_set).wait()
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *(_spread(gradient, ctx.how, ctx.process_set) for gradient in gradients)
