"""allreduce: one tensor combined over the ranks. The signatures are Horovod's."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from multiring.errors import UnsupportedError
from multiring.frontend.adasum_reduction import start_adasum
from multiring.frontend.dtype_conversion import DtypeConversion
from multiring.frontend.handles import Name, Pending, Several, handle_of, submit
from multiring.frontend.process_sets import ProcessSet, global_process_set, members_of
from multiring.frontend.reduce_ops import LINEAR, Adasum, Combination, combination, name_of
from multiring.frontend.signatures import allreduce_signature
from multiring.gradients.options import require_compressor
from multiring.runtime import Group, Handle
from multiring.runtime.named.named import Start
from multiring.torch.collectives.dtype_conversion import conversion_of, converted, converted_back
from multiring.torch.collectives.sparse import submit_sparse
from multiring.torch.compression import Compression
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
    """Return a new tensor: every rank's `tensor` combined.

    Differentiable for Average and Sum: its gradient is combined likewise, so every rank has to run that backward.

    Args:
        tensor: the same shape and type on all ranks: floats, integers, bools (no average), complex numbers (sum and
            average). A sparse one gives a sparse sum or average.
        average: DEPRECATED, use op.
        name: what the ranks match the operation by; without one, they match by the order of their operations.
        compression: in what form it travels.
        op: Average (the default), Sum, Adasum, Min, Max, Product, or their names.
        prescale_factor: multiplies the tensor first: integers in float64, 16-bit floats in float32.
        postscale_factor: multiplies the result likewise.
        process_set: by default all ranks.

    Raises:
        ArgumentError: `op` has no meaning for the type, this rank is not in the set, or the name is in use.
        HorovodInternalError: on every rank: they disagree, inputs are intact; or one is gone.
        UnsupportedError: not in host memory.
    """
    how = combination(op, average, prescale_factor, postscale_factor)
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
    """Start an `allreduce`, which has no gradient, and return its handle for `synchronize` and `poll`."""
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
    """Combine every rank's `tensor` into all of them, in place, and return it; otherwise as `allreduce`."""
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
    """Start an `allreduce_`, and return its handle for `synchronize` and `poll`."""
    how = combination(op, average, prescale_factor, postscale_factor)
    return handle_of(submit_allreduce(tensor, name, how, process_set, in_place=True))


def submit_allreduce(
    tensor: Tensor, name: Name, how: Combination, process_set: ProcessSet, *, in_place: bool, waits: bool = False
) -> Pending | Several:
    """Start to combine `tensor`, into itself or into a new one, which is the operation's result.

    With `waits` this thread waits for that next.
    """
    members = members_of(process_set)
    if is_sparse(tensor):
        return submit_sparse(members, tensor, name, how, in_place=in_place)
    require_plain(tensor)
    dtype = tensor.dtype
    conversion = conversion_of(dtype, how.op, how.postscale, members.size)
    signature = allreduce_signature(
        dtype_name(dtype), tensor.shape, name_of(how.op), (how.prescale, how.postscale), how.wire
    )
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
    """Return how a Group combines `tensors` by itself, coding what crosses hosts where that is asked for.

    None: `compression` has to make of them what is combined, and afterwards what they become.
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
    """Return what starts to combine `memory` in place, on any thread, and on this one, which with `waits` waits for it.

    Adasum combines `parts` of it, each by itself.
    """

    def start(group: Group, label: str, *, waits: bool = False) -> Handle:
        if how.op == Adasum:
            return start_adasum(group, [array_of(part) for part in parts], label=label)
        return group.all_reduce_async(buffer_from(memory), conversion.op, wire=how.wire, label=label, waits=waits)

    return start, partial(start, waits=waits)


def _memory(group: Group, tensor: Tensor, conversion: DtypeConversion, prescale: float, *, in_place: bool) -> Tensor:
    """Return what is to be combined in place: `tensor` as the Group takes it, itself or as a row-major copy."""
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
    """Raise UnsupportedError where a gradient of `how` is asked for and there is none."""
    if how.op not in LINEAR:
        raise UnsupportedError(
            f"the gradient of an allreduce by {name_of(how.op)}: want tensor.detach() there, or one of Average and Sum"
        )


class _Allreduce(torch.autograd.Function):
    """Combining is linear, and the same on all ranks: the gradient of the ranks' losses is combined the same way."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None, how: Combination, process_set: ProcessSet) -> Tensor:
        ctx.how, ctx.process_set = how, process_set
        found: Tensor = submit_allreduce(tensor, name, how, process_set, in_place=False, waits=True).wait()
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        require_linear(ctx.how)
        return _reduced(gradients[0], None, ctx.how, ctx.process_set), None, None, None
