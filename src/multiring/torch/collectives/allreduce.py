"""allreduce: combine one tensor over the ranks. The signatures are Horovod's."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from multiring._frontend.adasum_reduction import start_adasum
from multiring._frontend.dtype_conversion import DtypeConversion
from multiring._frontend.handles import Name, Pending, Several, Submitted, handle_of, submit
from multiring._frontend.process_sets import Members, ProcessSet, global_process_set, members_of
from multiring._frontend.reduce_ops import LINEAR, Adasum, Combination, combination, name_of
from multiring._frontend.signatures import ALLREDUCE, allreduce_signature
from multiring._gradients.options import require_compressor
from multiring._runtime import Group, Handle
from multiring._runtime.named.named import Start
from multiring.errors import Signature, UnsupportedError
from multiring.torch.collectives.by_nccl import may_serve, submit_agreed
from multiring.torch.collectives.dtype_conversion import conversion_of, converted, converted_back, scaled
from multiring.torch.collectives.small_allreduce import SmallKinds, TensorKind, submit_small
from multiring.torch.collectives.sparse import submit_sparse
from multiring.torch.collectives.staged import Staged, Staging, is_on_device, to_device
from multiring.torch.compression import Compression, compressor_of
from multiring.torch.interop import (
    array_of,
    buffer_from,
    dtype_name,
    is_one_piece,
    is_sparse,
    new_memory,
    note_change,
    require_plain,
    wants_gradient,
)


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return a new tensor that combines the tensors of all ranks.

    Average and Sum are differentiable. Their gradient is combined over the ranks in the same way. Every rank must
    therefore run the backward pass.

    Args:
        tensor: a tensor of the same shape and type on all ranks: floats, integers, bools (no average) or complex
            numbers (sum and average only). A sparse tensor gives a sparse sum or average.
        average: DEPRECATED, use op.
        name: the name by which the ranks match this operation. Unnamed operations are matched by their order.
        compression: the form in which the tensor travels, a member of `Compression`, its name, or the
            program's own compressor.
        op: Average (the default), Sum, Adasum, Min, Max, Product, or their names.
        prescale_factor: multiplies the tensor first: integers in float64, 16-bit floats in float32.
        postscale_factor: multiplies the result in the same way.
        process_set: the ranks that take part; by default all ranks.

    Raises:
        ArgumentError: the type does not support `op`, this rank is not in the set, or another operation in progress
            has this name.
        CollectiveError: the ranks' calls differ (inputs are unchanged), or a rank has failed. Every rank raises
            it.
        UnsupportedError: the tensor is neither in host memory nor on a CUDA device.
    """
    how, compression = combination(op, average, prescale_factor, postscale_factor), compressor_of(compression)
    direct = without_compressor(how, compression, [tensor])
    if direct is not None:
        return _reduced(tensor, name, direct, process_set)
    compressed, context = compression.compress(tensor)
    found: Tensor = compression.decompress(_reduced(compressed, name, how, process_set), context)
    return found


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an `allreduce` without a gradient, and return its handle.

    Pass the handle to `synchronize` or `poll`.
    """
    how = combination(op, average, prescale_factor, postscale_factor)
    return handle_of(submit_allreduce(tensor, name, how, process_set, in_place=False))


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Run an `allreduce` that overwrites `tensor` with the result, and return it."""
    how = combination(op, average, prescale_factor, postscale_factor)
    found: Tensor = submit_allreduce(tensor, name, how, process_set, in_place=True, waits=True).wait()
    return found


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an `allreduce_`, and return its handle.

    Pass the handle to `synchronize` or `poll`.
    """
    how = combination(op, average, prescale_factor, postscale_factor)
    return handle_of(submit_allreduce(tensor, name, how, process_set, in_place=True))


def submit_allreduce(
    tensor: Tensor, name: Name, how: Combination, process_set: ProcessSet, *, in_place: bool, waits: bool = False
) -> Submitted:
    """Start an allreduce of `tensor`; its result is `tensor` itself if `in_place`, else a new tensor.

    With `waits`, this thread must wait for the operation next.
    """
    return submit_alone(members_of(process_set), tensor, name, how, in_place=in_place, waits=waits)


def submit_alone(
    members: Members, tensor: Tensor, name: Name, how: Combination, *, in_place: bool, waits: bool = False
) -> Submitted:
    """Start an allreduce of `tensor` over these ranks; see `submit_allreduce`."""
    if is_sparse(tensor):
        return submit_sparse(members, tensor, name, how, in_place=in_place)
    if is_on_device(tensor):
        return _submit_on_device(members, tensor, name, how, in_place=in_place, waits=waits)
    require_plain(tensor)
    return _submit_on_host(members, tensor, name, how, in_place=in_place, waits=waits)


def _submit_on_device(
    members: Members, tensor: Tensor, name: Name, how: Combination, *, in_place: bool, waits: bool
) -> Submitted:
    kind = TensorKind(tensor.dtype, tensor.shape, tensor.device, tensor.layout, how)
    if not waits:

        def start(host: Tensor, placed: Name) -> Pending:
            return _submit_on_host(members, host, placed, how, in_place=True, waits=False)

        small = submit_small(members, kind, tensor, name, start, in_place=in_place)
        if small is not None:
            return small
    require_plain(tensor)
    require_combinable(tensor.dtype, how, members.size)
    if may_serve(members, [tensor], how):
        return _submit_agreed(members, tensor, name, how, in_place=in_place)
    found = _submit_staged(members, tensor, name, how, in_place=in_place, waits=waits)
    members.kept(SmallKinds).add(kind)
    return found


def _submit_agreed(members: Members, tensor: Tensor, name: Name, how: Combination, *, in_place: bool) -> Several:
    """Start an allreduce of a tensor on a device, by NCCL if all ranks can."""
    signature = _signature(tensor, how)
    return Several([submit_agreed(members, name, [tensor], how, signature, in_place=in_place)], _only)


def _only(found: list[list[Tensor]]) -> Tensor:
    return found[0][0]


def _signature(tensor: Tensor, how: Combination) -> Signature:
    scales = how.prescale, how.postscale
    return allreduce_signature(dtype_name(tensor.dtype), tensor.shape, name_of(how.op), scales, how.wire)


def _submit_staged(
    members: Members, tensor: Tensor, name: Name, how: Combination, *, in_place: bool, waits: bool
) -> Staged:
    """Start an allreduce of a tensor on a device, in host memory."""
    waits = waits and not members.line.is_ahead()
    staging = Staging(members, ALLREDUCE, name, [tensor])
    with staging.preparing([tensor]):
        host = staging.copied(tensor, waits=waits)

    def start(placed: Name) -> Pending:
        return _submit_on_host(members, host, placed, how, in_place=True, waits=waits)

    device, own = tensor.device, tensor if in_place else None  # a tensor that is not needed may be freed at once

    def finish(found: Tensor) -> Tensor:
        return to_device(members, found, device, own)

    return staging.submit(start, finish, waits=waits)


def require_combinable(dtype: torch.dtype, how: Combination, ranks: int) -> None:
    """Raise ArgumentError if tensors of `dtype` cannot be combined in this way. Nothing has been started then."""
    conversion_of(dtype, how.op, how.postscale, ranks)
    if how.prescale != 1.0:
        scaled(torch.empty(0, dtype=dtype, device="cpu"), how.prescale)


def _submit_on_host(
    members: Members, tensor: Tensor, name: Name, how: Combination, *, in_place: bool, waits: bool
) -> Pending:
    dtype = tensor.dtype
    conversion = conversion_of(dtype, how.op, how.postscale, members.size)
    signature = _signature(tensor, how)
    memory = _memory(members.group, tensor, conversion, how.prescale, in_place=in_place)

    def finish(_: Any) -> Tensor:
        found = converted_back(memory, conversion, dtype)
        if not in_place:
            return found
        if found.data_ptr() == tensor.data_ptr():
            note_change(tensor)
        else:
            tensor.detach().copy_(found)
        return tensor

    start, at_once = starting(memory, [memory], conversion, how, waits=waits)
    return submit(members, name, signature, start, finish, at_once)


def without_compressor(how: Combination, compression: Any, tensors: Sequence[Tensor]) -> Combination | None:
    """Return `how`, extended so that the Group itself compresses the data between hosts.

    The result is None if the caller must compress `tensors` before the reduction and decompress them afterwards.
    """
    if compression is Compression.none:
        return how
    require_compressor(compression)
    wire = getattr(compression, "wire", None)
    if wire is not None and how.op in LINEAR and all(tensor.dtype == torch.float32 for tensor in tensors):
        return how._replace(wire=wire)
    return None


def starting(
    memory: Tensor, parts: Sequence[Tensor], conversion: DtypeConversion, how: Combination, *, waits: bool
) -> tuple[Start, Start]:
    """Return two functions that start to combine `memory` in place: one for any thread, one for this thread.

    With `waits`, the second function expects that this thread waits for the operation next. Adasum combines each of
    `parts`, which lie in `memory`, separately.
    """

    def start(group: Group, label: str, *, waits: bool = False) -> Handle:
        if how.op == Adasum:
            return start_adasum(group, [array_of(part) for part in parts], label=label)
        return group.all_reduce_async(buffer_from(memory), conversion.op, wire=how.wire, label=label, waits=waits)

    return start, partial(start, waits=waits)


def _memory(group: Group, tensor: Tensor, conversion: DtypeConversion, prescale: float, *, in_place: bool) -> Tensor:
    """Return `tensor` in the form that the Group combines in place: itself, or a row-major copy."""
    source = tensor.detach()
    found = converted(source, conversion, prescale)
    is_own = found.data_ptr() != source.data_ptr()
    if is_one_piece(found) and (in_place or is_own):
        return found
    memory = new_memory(group, found.shape, found.dtype)
    return memory.copy_(found)


def _reduced(tensor: Tensor, name: str | None, how: Combination, process_set: ProcessSet) -> Tensor:
    found: Tensor
    if wants_gradient(tensor):
        found = _Allreduce.apply(tensor, name, how, process_set)  # type: ignore[no-untyped-call] # torch's own
    else:
        found = submit_allreduce(tensor, name, how, process_set, in_place=False, waits=True).wait()
    return found


def require_linear(how: Combination) -> None:
    """Raise UnsupportedError if an allreduce by `how` has no gradient."""
    if how.op not in LINEAR:
        raise UnsupportedError(
            f"the gradient of an allreduce by {name_of(how.op)} is not defined: want Average or Sum, or pass "
            "tensor.detach()"
        )


class _Allreduce(torch.autograd.Function):
    """Combine tensors by a linear operation; backward combines the ranks' gradients in the same way."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None, how: Combination, process_set: ProcessSet) -> Tensor:
        ctx.how, ctx.process_set = how, process_set
        found: Tensor = submit_allreduce(tensor, name, how, process_set, in_place=False, waits=True).wait()
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        require_linear(ctx.how)
        return _reduced(gradients[0], None, ctx.how, ctx.process_set), None, None, None
