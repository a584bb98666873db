"""grouped_allreduce: combine many tensors over the ranks in one operation. The signatures are Horovod's."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multiring._frontend.handles import (
    Name,
    Named,
    PartsOfGroup,
    Pending,
    Prefixed,
    Several,
    Submitted,
    handle_of,
    parts_of,
    submit,
)
from multiring._frontend.process_sets import Members, ProcessSet, global_process_set, members_of
from multiring._frontend.reduce_ops import Adasum, Combination, combination, name_of
from multiring._frontend.signatures import (
    DATA_TYPE,
    ELEMENTS,
    GROUPED_ALLREDUCE,
    OPERATION,
    PART,
    REDUCTION,
    SCALES,
    SHAPE,
    TENSORS,
    WIRE,
    scales_text,
)
from multiring.errors import ArgumentError, Signature
from multiring.torch.collectives.allreduce import (
    require_combinable,
    require_linear,
    starting,
    submit_alone,
    without_compressor,
)
from multiring.torch.collectives.by_nccl import may_serve, submit_agreed
from multiring.torch.collectives.dtype_conversion import conversion_of, converted, converted_back
from multiring.torch.collectives.staged import Staged, Staging, is_on_device
from multiring.torch.collectives.staged_group import GroupCopies
from multiring.torch.compression import Compression, compressor_of
from multiring.torch.fusion_buffer import BufferLayout, Packing, TensorSpan, layout_of, new_buffer
from multiring.torch.interop import (
    dtype_name,
    dtype_of,
    is_sparse,
    note_changes,
    require_plain,
    wants_gradient,
)


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Return new tensors: each of `tensors` combined over the ranks.

    One collective combines all tensors of one type. Every rank must pass the same number of tensors, of the same shapes
    and types in the same order. The arguments and errors are those of `allreduce`.
    """
    how, compression = combination(op, average, prescale_factor, postscale_factor), compressor_of(compression)
    direct = without_compressor(how, compression, tensors)
    if direct is not None:
        return list(_reduced(tensors, name, direct, process_set))
    pairs = [compression.compress(tensor) for tensor in tensors]
    found = _reduced([tensor for tensor, _ in pairs], name, how, process_set)
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(found, pairs, strict=True)]


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a `grouped_allreduce` without a gradient, and return its handle.

    Pass the handle to `synchronize` or `poll`.
    """
    how = combination(op, average, prescale_factor, postscale_factor)
    return handle_of(_submit(tensors, name, how, process_set, in_place=False))


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, ...]:
    """Run a `grouped_allreduce` that overwrites the tensors, and return them.

    Tensors that `shared_zeros_like` made are reduced in their own memory, without a copy.
    """
    how = combination(op, average, prescale_factor, postscale_factor)
    span = None
    if name is not None and tensors and isinstance(tensors, list | tuple):
        # Repeat the group's previous operation, if there was one. The last sum has displaced the code and the objects
        # of this module from the CPU's caches, and the repetition needs few of them.
        span = members_of(process_set).kept(Packing).known_span(tensors)
        repeat = None if span is None else span.repeats.get((name, how))
        again = None if repeat is None else repeat.start()
        if again is not None:
            note_changes(tensors)
            again.wait()
            return tuple(tensors)
    found: tuple[Tensor, ...] = _submit(tensors, name, how, process_set, in_place=True, waits=True, span=span).wait()
    return found


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a `grouped_allreduce_`, and return its handle.

    Pass the handle to `synchronize` or `poll`.
    """
    how = combination(op, average, prescale_factor, postscale_factor)
    return handle_of(_submit(tensors, name, how, process_set, in_place=True))


_MOST_REPEATS = 8  # the number of names whose operations are kept for one span
_WHOLE = "1 of 1"  # the part's name if one part holds all tensors


class _Group(NamedTuple):
    """Tensors of one type, their combination, and the name of their operation."""

    members: Members
    tensors: Sequence[Tensor]
    how: Combination
    name: Name
    part: str = _WHOLE
    waits: bool = False  # whether this thread waits for the operation next


def _submit(
    tensors: Sequence[Tensor],
    name: str | None,
    how: Combination,
    process_set: ProcessSet,
    *,
    in_place: bool,
    waits: bool = False,
    span: TensorSpan | None = None,
) -> Submitted:
    """Start to combine `tensors`; `span` is their span if the caller has already found it."""
    members = members_of(process_set)
    if not tensors:
        raise ArgumentError("a group of no tensors: want at least one")
    if any(map(is_on_device, tensors)) and not any(map(is_sparse, tensors)):
        return _submit_of_devices(_Group(members, tuple(tensors), how, name), in_place=in_place)
    return _submit_on_host(members, tensors, name, how, in_place=in_place, waits=waits, span=span)


def _submit_of_devices(group: _Group, *, in_place: bool) -> Submitted:
    """Start to combine tensors of which at least one is on a device."""
    members, tensors, how, name = group.members, group.tensors, group.how, group.name
    for tensor in tensors:
        require_plain(tensor)
        require_combinable(tensor.dtype, how, members.size)
    if not may_serve(members, tensors, how):
        return _submit_staged(group, in_place=in_place)
    layout = layout_of(tensors[0].dtype, tuple(tensor.shape for tensor in tensors))
    signature = _signature(layout, layout.total, how, _WHOLE)
    return Several([submit_agreed(members, name, tensors, how, signature, in_place=in_place)], _as_group)


def _as_group(found: list[list[Tensor]]) -> tuple[Tensor, ...]:
    return tuple(found[0])


def _submit_staged(group: _Group, *, in_place: bool) -> Staged:
    """Start to combine such tensors in host memory; the host's combination includes the other tensors."""
    members, tensors, how, name = group.members, group.tensors, group.how, group.name
    staging = Staging(members, GROUPED_ALLREDUCE, name, tensors)
    with staging.preparing(tensors):
        copies = GroupCopies(members, staging, tensors, in_place=in_place)

    def start(placed: Name) -> Submitted:
        copies.fill_gaps()
        return _submit_on_host(members, copies.hosts, placed, how, in_place=True)

    return staging.submit(start, copies.put_back)


def _submit_on_host(
    members: Members,
    tensors: Sequence[Tensor],
    name: Name,
    how: Combination,
    *,
    in_place: bool,
    waits: bool = False,
    span: TensorSpan | None = None,
) -> Submitted:
    group = _Group(members, tensors if isinstance(tensors, list | tuple) else tuple(tensors), how, name, waits=waits)
    span = _span_of(group, span) if in_place else None
    if span is not None:
        return _submit_span(group, span)
    if _are_plain_and_alike(tensors):
        return _submit_copied(group, in_place=in_place)
    if any(map(is_sparse, tensors)):
        return _submit_each(members, tensors, name, how, in_place=in_place)
    for tensor in tensors:
        require_plain(tensor)
    by_type: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        by_type.setdefault(tensor.dtype, []).append(place)
    for dtype in by_type:
        conversion_of(dtype, how.op, how.postscale, members.size)  # reject a bad type before anything is started
    parts = parts_of(members, name, len(by_type))
    started = [
        _submit_alike(_Group(members, [tensors[place] for place in places], how, part, more[0][1]), in_place=in_place)
        for places, (part, more) in zip(by_type.values(), parts, strict=True)
    ]

    def finish(found: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        by_place = {
            place: tensor
            for places, combined in zip(by_type.values(), found, strict=True)
            for place, tensor in zip(places, combined, strict=True)
        }
        return tuple(by_place[place] for place in range(len(tensors)))

    return Several(started, finish, PartsOfGroup(members, parts[0][0], GROUPED_ALLREDUCE, len(by_type)))


def _submit_each(
    members: Members, tensors: Sequence[Tensor], name: Name, how: Combination, *, in_place: bool
) -> Several:
    """Start an operation for each tensor, because some are sparse. The first one meets a group without these."""
    parts = [_in_group(part, more) for part, more in parts_of(members, name, len(tensors))]
    started = [
        submit_alone(members, tensor, part, how, in_place=in_place) for tensor, part in zip(tensors, parts, strict=True)
    ]
    return Several(started, tuple, PartsOfGroup(members, parts[0], GROUPED_ALLREDUCE, len(parts)))


def _in_group(name: Named, more: Signature) -> Named:
    """Return the name of a single operation that is a part of a group, with its terms."""
    return Prefixed(GROUPED_ALLREDUCE, name, more) if isinstance(name, str) else name._replace(more=more)


def _are_plain_and_alike(tensors: Sequence[Tensor]) -> bool:
    """Return whether all tensors are dense, of one type and in host memory. The check is fast."""
    try:
        kinds = {(tensor.dtype, tensor.layout, tensor.is_cpu) for tensor in tensors}
    except AttributeError:  # an element is not a tensor
        return False
    return len(kinds) == 1 and next(iter(kinds))[1:] == (torch.strided, True)


def _is_in_place(members: Members, dtype: torch.dtype, how: Combination) -> bool:
    """Return whether a Group can combine tensors of `dtype` without any conversion."""
    if how.op == Adasum or how.prescale != 1.0:
        return False
    return conversion_of(dtype, how.op, how.postscale, members.size).is_plain


def _span_of(group: _Group, known: TensorSpan | None = None) -> TensorSpan | None:
    """Return the span of the group's tensors, or None if they cannot be combined in their own memory."""
    span = known or group.members.kept(Packing).span_of(group.tensors)
    return span if span is not None and _is_in_place(group.members, span.layout.dtype, group.how) else None


def _submit_alike(group: _Group, *, in_place: bool) -> Pending:
    span = _span_of(group) if in_place else None
    return _submit_copied(group, in_place=in_place) if span is None else _submit_span(group, span)


def _submit_copied(group: _Group, *, in_place: bool) -> Pending:
    """Start to combine copies of tensors of one type in a separate buffer."""
    members, tensors, how, name, part, waits = group
    dtype = tensors[0].dtype
    conversion = conversion_of(dtype, how.op, how.postscale, members.size)
    sources = [converted(tensor.detach(), conversion, how.prescale) for tensor in tensors]
    layout = layout_of(dtype_of(conversion.dtype), tuple(source.shape for source in sources))
    memory, views = members.kept(Packing).take(members.group, layout) if in_place else new_buffer(members.group, layout)
    torch._foreach_copy_(views, sources)

    def finish(_: Any) -> tuple[Tensor, ...]:
        found = [converted_back(view, conversion, dtype) for view in views]
        if not in_place:
            return tuple(found)
        _put_each([tensor.detach() for tensor in tensors], found)
        members.kept(Packing).give_back(layout, memory, views)
        return tuple(tensors)

    signature = _signature(layout_of(dtype, tuple(tensor.shape for tensor in tensors)), layout.total, how, part)
    start, at_once = starting(memory, views, conversion, how, waits=waits)
    pending = submit(members, name, signature, start, finish, at_once)
    pending.is_whole_group = part == _WHOLE
    return pending


def _put_each(places: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    """Copy each tensor of `found` into its place."""
    if any(place.is_neg() or place.is_conj() for place in places):  # _foreach_copy_ does not support these
        for place, each in zip(places, found, strict=True):
            place.copy_(each)
    else:
        torch._foreach_copy_(list(places), list(found))


def _submit_span(group: _Group, span: TensorSpan) -> Pending:
    """Start to combine tensors in their own memory."""
    members, tensors, how, name, part, waits = group

    def finish(_: Any) -> tuple[Tensor, ...]:
        if not waits:
            note_changes(tensors)
        return tuple(tensors)

    conversion = conversion_of(span.layout.dtype, how.op, how.postscale, members.size)
    signature = _signature(span.layout, span.layout.total, how, part)
    start, at_once = starting(span.memory, (), conversion, how, waits=waits)
    pending = submit(members, name, signature, start, finish, at_once)
    pending.is_whole_group = part == _WHOLE
    if waits:  # tell autograd now, while the tensors are in the CPU's caches; the sum displaces them
        note_changes(tensors)
        if isinstance(name, str) and part == _WHOLE and (repeat := pending.repeat()) is not None:
            if len(span.repeats) >= _MOST_REPEATS:
                span.repeats.clear()
            span.repeats[name, how] = repeat
    return pending


@lru_cache(maxsize=1024)
def _signature(layout: BufferLayout, elements: int, how: Combination, part: str) -> Signature:
    return (
        (OPERATION, GROUPED_ALLREDUCE),
        (TENSORS, str(len(layout.shapes))),
        (DATA_TYPE, dtype_name(layout.dtype)),
        (SHAPE, " ".join(str(tuple(shape)).replace(" ", "") for shape in layout.shapes)),
        (REDUCTION, name_of(how.op)),
        (SCALES, scales_text(how.prescale, how.postscale)),
        (WIRE, str(how.wire)),
        (PART, part),
        (ELEMENTS, str(elements)),
    )


def _reduced(
    tensors: Sequence[Tensor], name: str | None, how: Combination, process_set: ProcessSet
) -> Sequence[Tensor]:
    found: Sequence[Tensor]
    if wants_gradient(*tensors):
        found = _GroupedAllreduce.apply(name, how, process_set, *tensors)  # type: ignore[no-untyped-call] # torch's own
    else:
        found = _submit(tensors, name, how, process_set, in_place=False, waits=True).wait()
    return found


class _GroupedAllreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, how: Combination, process_set: ProcessSet, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.how, ctx.process_set = how, process_set
        found: tuple[Tensor, ...] = _submit(tensors, name, how, process_set, in_place=False, waits=True).wait()
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        require_linear(ctx.how)
        return None, None, None, *_reduced(gradients, None, ctx.how, ctx.process_set)
