"""all_reduce, reduce and reduce_scatter of a process group, in all their variants."""

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from multiring._runtime import Group
from multiring._runtime.arrays import Buffer
from multiring._schedule import Splits
from multiring.torch.c10d.arguments import alike, blocks_of, one_of, require_as_many, require_like, require_rank
from multiring.torch.c10d.buffers import (
    as_bytes,
    bytes_in,
    contents,
    flat,
    in_a_row,
    place_for,
    put,
    require_host,
    require_places,
    touching,
)
from multiring.torch.c10d.errors import RefusedError
from multiring.torch.c10d.group_state import GroupState, ReadyOperation
from multiring.torch.c10d.reduce_ops import Fold, ReduceRule, reduction_of
from multiring.torch.c10d.sparse import sparse_sum
from multiring.torch.interop import dtype_name, is_one_piece, is_sparse, new_memory

Settle = Callable[[], None] | None


def allreduce(
    state: GroupState, tensors: Any, opts: Any = None, *, op: Any = None, timeout: timedelta | None = None
) -> Any:
    """Combine the tensors of all ranks, in place; sparse tensors can be summed or averaged.

    A rank may pass several tensors of one type and size. All tensors of all ranks are then combined into each of them.
    """
    opts, op = _options(opts, op)
    if not isinstance(tensors, Tensor) and len(tensors) > 1:
        alike("all_reduce", tensors)
        ready = _all_reduce_several(state.group, tensors, reduction_of(op))
        return state.issue("all_reduce", ready, state.options_of(opts, timeout), tensors)
    tensor = one_of("all_reduce", tensors)
    if is_sparse(tensor):
        require_host("all_reduce", tensor, is_dense=False)
        reduction_of(op).check("all_reduce", tensor.dtype)
        ready = sparse_sum(state.group, tensor, reduction_of(op))
    else:
        ready = _all_reduce(state.group, tensor, reduction_of(op))
    return state.issue("all_reduce", ready, state.options_of(opts, timeout), (tensor,))


def allreduce_coalesced(state: GroupState, tensors: Sequence[Tensor], opts: Any = None) -> Any:
    """Combine many tensors, each as `allreduce` does."""
    opts, op = _options(opts, None)
    reduction = reduction_of(op)
    for tensor in tensors:
        require_host("all_reduce_coalesced", tensor)
    apart = touching([((tensor,), ()) for tensor in tensors])
    ready = [
        _all_reduce(state.group, tensor, reduction, apart=each) for tensor, each in zip(tensors, apart, strict=True)
    ]
    return state.issue_several("all_reduce_coalesced", ready, opts, tensors)


def reduce(
    state: GroupState,
    tensors: Any,
    opts: Any = None,
    *,
    root: int | None = None,
    op: Any = None,
    timeout: timedelta | None = None,
) -> Any:
    """Combine the tensors of all ranks into the root's tensor; the other ranks' tensors are unchanged."""
    if isinstance(opts, int):
        opts, root = None, opts
    opts, op = _options(opts, op)
    tensor = one_of("reduce", tensors)
    to = root if root is not None else 0 if opts is None else opts.rootRank
    require_rank("reduce", "root", to, state.group.size)
    ready = _reduce(state.group, tensor, reduction_of(op), to)
    return state.issue("reduce", ready, state.options_of(opts, timeout), (tensor,))


def reduce_scatter(
    state: GroupState,
    outputs: Any,
    inputs: Any,
    opts: Any = None,
    *,
    op: Any = None,
    timeout: timedelta | None = None,
) -> Any:
    """Combine the lists of tensors of all ranks, and write tensor r of the result to the output of rank r."""
    opts, op = _options(opts, op)
    output = one_of("reduce_scatter", outputs)
    blocks = blocks_of("reduce_scatter", inputs, state.group.size)
    require_like("reduce_scatter", output, blocks[state.group.rank])
    counts = tuple(block.numel() for block in blocks)
    whole = in_a_row(blocks)
    if whole is None:
        whole = torch.cat([contents(block).detach().view(-1) for block in blocks])
    ready = _reduce_scatter(state.group, output, whole, counts, reduction_of(op))
    return state.issue("reduce_scatter", ready, state.options_of(opts, timeout), (output,))


def reduce_scatter_single(state: GroupState, output: Tensor, source: Tensor, opts: Any = None) -> Any:
    """Combine the tensors of all ranks, and write part r of the result to the output of rank r."""
    opts, op = _options(opts, None)
    ready = _equal_parts(state, "reduce_scatter_single", output, source, reduction_of(op))
    return state.issue("reduce_scatter_single", ready, state.options_of(opts), (output,))


def reduce_scatter_single_coalesced(
    state: GroupState, outputs: Sequence[Tensor], sources: Sequence[Tensor], opts: Any = None
) -> Any:
    """Reduce and scatter many tensors, each as `reduce_scatter_single` does."""
    opts, op = _options(opts, None)
    what, reduction = "reduce_scatter_single_coalesced", reduction_of(op)
    require_as_many(what, outputs, sources)
    for tensor in (*outputs, *sources):
        require_host(what, tensor)
    pairs = list(zip(outputs, sources, strict=True))
    apart = touching([((output,), (source,)) for output, source in pairs])
    ready = [_equal_parts(state, what, *pair, reduction, apart=each) for pair, each in zip(pairs, apart, strict=True)]
    return state.issue_several(what, ready, opts, outputs)


def _equal_parts(
    state: GroupState, what: str, output: Tensor, source: Tensor, reduction: ReduceRule, *, apart: bool = False
) -> ReadyOperation:
    ranks, each = state.group.size, output.numel()
    require_host(what, source)
    require_host(what, output)
    if source.numel() != each * ranks or source.dtype is not output.dtype:
        raise RefusedError(
            f"{what}: the input is {dtype_name(source.dtype)} of {source.numel()} elements, the output "
            f"{dtype_name(output.dtype)} of {each}; want the same type, and {ranks} times as many for {ranks} ranks"
        )
    return _reduce_scatter(state.group, output, contents(source), (each,) * ranks, reduction, apart=apart)


def _options(opts: Any, op: Any) -> tuple[Any, Any]:
    """Return torch's options or None, and the ReduceOp; `opts` may be options, a ReduceOp, or None."""
    if opts is None or hasattr(opts, "reduceOp"):
        return opts, (torch.distributed.ReduceOp.SUM if opts is None else opts.reduceOp) if op is None else op
    return None, opts


# ---- operations that are ready to start ----


def _all_reduce(
    group: Group, tensor: Tensor, reduction: ReduceRule, name: str = "all_reduce", *, apart: bool = False
) -> ReadyOperation:
    require_host(name, tensor)
    reduction.check(name, tensor.dtype)
    if reduction.fold is not None:
        return _folded(group, tensor, f"{name} {reduction.name}", reduction.fold)
    if reduction.factor is not None:
        place = _multiplied(group, tensor, reduction.factor)
        settle: Settle = functools.partial(put, tensor, place)
    else:
        place, settle = place_for(group, tensor, apart=apart)
        if place is not tensor:
            place.copy_(tensor.detach())
    buffer = _combined(place)
    title = f"{name} {reduction.name} of {buffer.dtype} of shape {buffer.shape}"
    return ReadyOperation(
        lambda waits: group.known_sizes.all_reduce(buffer, str(reduction.op), title, waits=waits), settle
    )


def _all_reduce_several(group: Group, tensors: Sequence[Tensor], reduction: ReduceRule) -> ReadyOperation:
    """Return an all_reduce of the combination of this rank's tensors; all of them receive the result."""
    count = len(tensors)
    name = f"all_reduce of {count} tensors a rank,"
    reduction.check(name, tensors[0].dtype)
    require_places(*tensors)
    together = new_memory(group, tensors[0].shape, tensors[0].dtype)
    with torch.no_grad():
        together.copy_(functools.reduce(reduction.combine, [each.detach() for each in tensors]))
        if reduction.op == "average":
            if not together.dtype.is_floating_point and not together.dtype.is_complex:
                raise RefusedError(
                    f"{name} average of {dtype_name(together.dtype)}; want sums, or a floating-point type"
                )
            together.div_(count)
    ready = _all_reduce(group, together, reduction, name)

    def settle() -> None:
        if ready.settle is not None:
            ready.settle()
        for each in tensors:
            put(each, together)

    return ReadyOperation(ready.start, settle)


def _reduce(group: Group, tensor: Tensor, reduction: ReduceRule, root: int) -> ReadyOperation:
    """Return an all_reduce whose result only the root keeps. On one host, it passes over the memory only once."""
    if group.rank == root:
        work = tensor
    else:
        require_host("reduce", tensor)
        work = new_memory(group, tensor.shape, tensor.dtype)
        work.copy_(tensor.detach())
    return _all_reduce(group, work, reduction, f"reduce to rank {root}")


def _reduce_scatter(
    group: Group, output: Tensor, whole: Tensor, counts: tuple[int, ...], reduction: ReduceRule, *, apart: bool = False
) -> ReadyOperation:
    """Return the operation that combines the contiguous `whole`, and gives `counts[r]` elements to rank r."""
    reduction.check("reduce_scatter", whole.dtype)
    if reduction.fold is not None:
        return _folded_parts(group, output, whole, counts, (reduction.name, reduction.fold))
    if reduction.factor is not None:
        whole = _multiplied(group, whole, reduction.factor)
    is_within = is_one_piece(output) and bytes_in(as_bytes(output), as_bytes(whole))
    place, settle = place_for(group, output, apart=apart or is_within)
    source, target = _combined(whole), _combined(place)
    if whole.dtype.is_complex:
        counts = tuple(2 * count for count in counts)
    title = f"reduce_scatter {reduction.name} of {_parts(counts)} {source.dtype}"
    op = str(reduction.op)
    return ReadyOperation(
        lambda waits: group.known_sizes.reduce_scatter((source, target), counts, op, title, waits=waits), settle
    )


def _folded(group: Group, tensor: Tensor, name: str, fold: Fold) -> ReadyOperation:
    """Return an operation in which every rank gathers all contributions and combines them itself."""
    require_places(tensor)
    own = contents(tensor).detach()
    everyone = new_memory(group, (group.size, own.numel()), own.dtype)
    source, target = as_bytes(own), as_bytes(everyone)
    title = f"{name} of {dtype_name(own.dtype)} of shape ({own.numel()},)"
    sizes = (source.shape[0],) * group.size
    return ReadyOperation(
        lambda waits: group.known_sizes.all_gather(source, target, sizes, title, waits=waits),
        lambda: put(tensor, functools.reduce(fold, everyone.unbind())),
    )


def _folded_parts(
    group: Group, output: Tensor, whole: Tensor, counts: tuple[int, ...], how: tuple[str, Fold]
) -> ReadyOperation:
    """Return an operation in which every rank receives all contributions to its part and combines them itself."""
    require_places(output)
    everyone = new_memory(group, (group.size, output.numel()), output.dtype)
    source, target = as_bytes(whole.detach()), as_bytes(everyone)
    itemsize = output.element_size()
    sizes = Splits(tuple(count * itemsize for count in counts), (output.numel() * itemsize,) * group.size)
    name, fold = how
    title = f"reduce_scatter {name} of {_parts(counts)} {dtype_name(output.dtype)}"
    return ReadyOperation(
        lambda waits: group.known_sizes.all_to_all((source, target), sizes, source.shape[0], title, waits=waits),
        lambda: put(output, functools.reduce(fold, everyone.unbind())),
    )


def _multiplied(group: Group, tensor: Tensor, factor: Any) -> Tensor:
    place = new_memory(group, tensor.shape, tensor.dtype)
    with torch.no_grad():
        place.copy_(tensor.detach() * factor) if isinstance(factor, Tensor) else torch.mul(
            tensor.detach(), factor, out=place
        )
    return place


def _combined(place: Tensor) -> Buffer:
    """Return contiguous memory as a buffer for a Group; a complex number becomes a pair of real numbers."""
    return flat(torch.view_as_real(place.detach()) if place.dtype.is_complex else place)


def _parts(counts: tuple[int, ...]) -> str:
    """Return a text of each rank's count of elements; the text is short if all counts are equal."""
    if len(set(counts)) == 1:
        return f"{len(counts)} times {counts[0]}"
    return "+".join(map(str, counts))
